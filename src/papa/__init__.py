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
    from papa.averager import Averager
    from papa.averaging_report import Averaging
    from papa.chosen_soups import learned_soup, model_stock
    from papa.data_loaders import loaders
    from papa.distillation import distill
    from papa.ensemble import Ensemble
    from papa.evaluation import Evaluation, evaluate
    from papa.files import soup_files
    from papa.interpolation import interpolate
    from papa.joining import Joined, averaging, join
    from papa.population import Population
    from papa.repair import RepairMerges, repair_, reset_batch_norm_
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
    from papa.saved_soups import save_soup
    from papa.similarity import feature_similarity
    from papa.soup import GreedySoup, average_soup, greedy_soup
    from papa.task import Task
    from papa.training import Callback, Outcome, train

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "advice": ("Diagnosis", "diagnose", "loss_probe"),
        "align": ("AlignMerges", "align_", "align_all_", "aligned_soups", "symmetries"),
        "averager": ("Averager",),
        "averaging_report": ("Averaging",),
        "chosen_soups": ("learned_soup", "model_stock"),
        "data_loaders": ("loaders",),
        "distillation": ("distill",),
        "ensemble": ("Ensemble",),
        "evaluation": ("Evaluation", "evaluate"),
        "files": ("soup_files",),
        "interpolation": ("interpolate",),
        "joining": ("Joined", "averaging", "join"),
        "population": ("Population",),
        "repair": ("RepairMerges", "repair_", "reset_batch_norm_"),
        "rules": (
            *("AdaptivePush", "AveragingContext", "Elastic", "ExtraRow", "Gossip", "GradientWeightedPush"),
            *("Independent", "Lookahead", "MergeAll", "MergeMany", "MergePairs", "Mix", "OuterStep", "Push"),
            *("PushPull", "Rule", "ScoreWeightedPush", "Shuffle", "SparseAverage"),
        ),
        "saved_soups": ("save_soup",),
        "similarity": ("feature_similarity",),
        "soup": ("GreedySoup", "average_soup", "greedy_soup"),
        "task": ("Task",),
        "training": ("Callback", "Outcome", "train"),
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
