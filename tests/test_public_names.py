from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import papa

FOLDERS = ["align", "analysis", "attach", "core", "couplings", "distributed", "errors", "evaluation", "files"]
FOLDERS += ["integrations", "repair", "streams", "training"]
PUBLIC_NAMES = [
    "AdaptivePush",
    "AlignMerges",
    "Averager",
    "Averaging",
    "AveragingContext",
    "Callback",
    "Verdict",
    "Elastic",
    "Ensemble",
    "Evaluation",
    "ExtraRow",
    "Gossip",
    "GradientWeightedPush",
    "GreedySoup",
    "Independent",
    "Joined",
    "Lookahead",
    "MergeAll",
    "MergeMany",
    "MergePairs",
    "Mix",
    "Outcome",
    "OuterStep",
    "PapaError",
    "PapaWarning",
    "Population",
    "Push",
    "PushPull",
    "RepairMerges",
    "Rule",
    "ScoreWeightedPush",
    "Shuffle",
    "SparseAverage",
    "Task",
    "__version__",
    "align_",
    "align_all_",
    "aligned_soups",
    "average_soup",
    "averaging",
    "diagnose",
    "distill",
    "evaluate",
    "feature_similarity",
    "greedy_soup",
    "interpolate",
    "join",
    "learned_soup",
    "loaders",
    "loss_probe",
    "model_stock",
    "repair_",
    "reset_batch_norm_",
    "save_soup",
    "soup_files",
    "symmetries",
    "train",
]


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(papa.__all__) == sorted([*PUBLIC_NAMES, *FOLDERS])
    assert all(isinstance(getattr(papa, name), ModuleType) for name in FOLDERS)


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "__version__"])
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(papa, name)
    # A dataclass without a docstring gets one that merely repeats its signature.
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if isinstance(getattr(papa, name), type)])
def test_every_public_method_says_what_it_does(name: str) -> None:
    """Or what it overrides does."""
    kind = getattr(papa, name)
    for attribute, value in vars(kind).items():
        if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(kind, attribute)), f"{name}.{attribute}"
