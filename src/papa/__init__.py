"""papa: train a population of networks, keep their weights together, and get one network.

Use `papa.Population`, `papa.Averager` and a rule such as `papa.Push` in your own training loop, or `papa.train`. The
packages `papa.lab` (recipes, data sets, reports) and `papa.cli` (the command `papa`) are built on this library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from papa._version import __version__
from papa.errors import PapaError, PapaWarning
from papa.lazy import lazy_names

if TYPE_CHECKING:
    from papa.advice import Diagnosis, diagnose, loss_probe
    from papa.align import AlignMerges, align_, align_all_, aligned_soups, symmetries
    from papa.analysis.interpolation import interpolate
    from papa.analysis.similarity import feature_similarity
    from papa.attach import Joined, averaging, join
    from papa.core.averager import Averager
    from papa.core.averaging_report import Averaging
    from papa.core.chosen_soups import learned_soup, model_stock
    from papa.core.ensemble import Ensemble
    from papa.core.merges import Independent, MergeAll, MergeMany, MergePairs, Mix
    from papa.core.population import Population
    from papa.core.push import Push
    from papa.core.rules import AveragingContext, ExtraRow, Rule
    from papa.core.soup import GreedySoup, average_soup, greedy_soup
    from papa.couplings.adaptive import AdaptivePush
    from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
    from papa.couplings.sparse import Shuffle, SparseAverage
    from papa.couplings.weighted import GradientWeightedPush, PushPull, ScoreWeightedPush
    from papa.evaluation.scores import Evaluation, evaluate
    from papa.files import soup_files
    from papa.files.saved_soups import save_soup
    from papa.repair import RepairMerges, repair_, reset_batch_norm_
    from papa.training import Callback, Outcome, train
    from papa.training.data_loaders import loaders
    from papa.training.distillation import distill
    from papa.training.task import Task

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "advice": (
            "Diagnosis",
            "diagnose",
            "loss_probe",
        ),
        "align": (
            "AlignMerges",
            "align_",
            "align_all_",
            "aligned_soups",
            "symmetries",
        ),
        "core.averager": ("Averager",),
        "core.averaging_report": ("Averaging",),
        "core.chosen_soups": (
            "learned_soup",
            "model_stock",
        ),
        "training.data_loaders": ("loaders",),
        "training.distillation": ("distill",),
        "core.ensemble": ("Ensemble",),
        "evaluation.scores": (
            "Evaluation",
            "evaluate",
        ),
        "files": ("soup_files",),
        "analysis.interpolation": ("interpolate",),
        "attach": (
            "Joined",
            "averaging",
            "join",
        ),
        "core.population": ("Population",),
        "repair": (
            "RepairMerges",
            "repair_",
            "reset_batch_norm_",
        ),
        "couplings.adaptive": ("AdaptivePush",),
        "core.rules": (
            "AveragingContext",
            "ExtraRow",
            "Rule",
        ),
        "couplings.anchored": (
            "Elastic",
            "Gossip",
            "Lookahead",
            "OuterStep",
        ),
        "couplings.weighted": (
            "GradientWeightedPush",
            "PushPull",
            "ScoreWeightedPush",
        ),
        "core.merges": (
            "Independent",
            "MergeAll",
            "MergeMany",
            "MergePairs",
            "Mix",
        ),
        "core.push": ("Push",),
        "couplings.sparse": (
            "Shuffle",
            "SparseAverage",
        ),
        "files.saved_soups": ("save_soup",),
        "analysis.similarity": ("feature_similarity",),
        "core.soup": (
            "GreedySoup",
            "average_soup",
            "greedy_soup",
        ),
        "training.task": ("Task",),
        "training": (
            "Callback",
            "Outcome",
            "train",
        ),
    },
)
"""Names that are imported when they are first used, by module, so that `import papa` does not import torch."""

__all__ = [
    "AdaptivePush",
    "AlignMerges",
    "Averager",
    "Averaging",
    "AveragingContext",
    "Callback",
    "Diagnosis",
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
