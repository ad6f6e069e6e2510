"""Training a population: the loop, what it ends with, and `papa.train`."""

from papa.lab.freezing import FrozenBody
from papa.lab.probes import MergeProbes
from papa.training.batches import Augment
from papa.training.entry import sgd, train
from papa.training.loop import Callback, Companion, Training
from papa.training.merge_options import MergeOptions
from papa.training.options import Engine, EpochRecord, Length, Numerics
from papa.training.outcome import Outcome, finalize
from papa.training.scores import Scores
from papa.training.stacked import Stacked
from papa.training.trajectory import TrajectoryAverage

__all__ = [
    "Augment",
    "Callback",
    "Companion",
    "Engine",
    "EpochRecord",
    "FrozenBody",
    "Length",
    "MergeOptions",
    "MergeProbes",
    "Numerics",
    "Outcome",
    "Scores",
    "Stacked",
    "Training",
    "TrajectoryAverage",
    "finalize",
    "sgd",
    "train",
]
