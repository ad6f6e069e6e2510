"""papa: train a population of networks, keep their weights together, and get one network.

Use `papa.Population`, `papa.Averager` and a rule such as `papa.Push` in your own training loop, or `papa.train`. The
packages `papa.lab` (recipes, data sets, reports) and `papa.cli` (the command `papa`) are built on this library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from papa._version import __version__
from papa.averager import Averager
from papa.averaging import Averaging
from papa.ensemble import Ensemble
from papa.errors import PapaError, PapaWarning
from papa.evaluation import Evaluation, evaluate
from papa.population import Population
from papa.rules import (
    AdaptivePush,
    AveragingContext,
    Elastic,
    ExtraRow,
    Gossip,
    GradientWeightedPush,
    Independent,
    Lookahead,
    MergeAll,
    MergeMany,
    MergePairs,
    Mix,
    OuterStep,
    Push,
    PushPull,
    Rule,
    ScoreWeightedPush,
    Shuffle,
    SparseAverage,
)
from papa.soup import GreedySoup, average_soup, greedy_soup

if TYPE_CHECKING:
    from papa.advice import Diagnosis, diagnose, loss_probe
    from papa.align import AlignMerges, align_, align_all_, aligned_soups, symmetries
    from papa.chosen_soups import learned_soup, model_stock
    from papa.data_loaders import loaders
    from papa.distillation import distill
    from papa.files import soup_files
    from papa.interpolation import interpolate
    from papa.joining import Joined, averaging, join
    from papa.repair import RepairMerges, repair_, reset_batch_norm_
    from papa.similarity import feature_similarity
    from papa.task import Task
    from papa.training import Callback, Outcome, train

_LAZY = {
    "advice": ("Diagnosis", "diagnose", "loss_probe"),
    "align": ("AlignMerges", "align_", "align_all_", "aligned_soups", "symmetries"),
    "data_loaders": ("loaders",),
    "distillation": ("distill",),
    "files": ("soup_files",),
    "interpolation": ("interpolate",),
    "chosen_soups": ("learned_soup", "model_stock"),
    "joining": ("Joined", "averaging", "join"),
    "repair": ("RepairMerges", "repair_", "reset_batch_norm_"),
    "similarity": ("feature_similarity",),
    "task": ("Task",),
    "training": ("Callback", "Outcome", "train"),
}
"""Names that are imported when they are first used, by module: a loop of your own needs none of them."""

_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}

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
    "soup_files",
    "symmetries",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = globals()[name] = getattr(importlib.import_module(f"papa.{_MODULE_OF[name]}"), name)
        return value
    # `papa.training` and the like without an import of their own.
    if name in _LAZY or name in ("data", "group", "schedules"):
        return importlib.import_module(f"papa.{name}")
    raise AttributeError(f"module 'papa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
