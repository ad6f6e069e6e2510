"""Training a population: the loop, what it ends with, and `papa.train`."""

from papa.training.entry import sgd, train
from papa.training.feed import Augment
from papa.training.freezing import FrozenBody
from papa.training.loop import Companion, Hook, Training
from papa.training.merging import Merging
from papa.training.outcome import Outcome, harvest
from papa.training.parts import Engine, EpochRecord, Length, Numerics
from papa.training.probes import MergeProbes
from papa.training.scores import Scores
from papa.training.stacked import Stacked
from papa.training.trajectory import TrajectoryAverage

__all__ = [
    "Augment",
    "Companion",
    "Engine",
    "EpochRecord",
    "FrozenBody",
    "Hook",
    "Length",
    "MergeProbes",
    "Merging",
    "Numerics",
    "Outcome",
    "Scores",
    "Stacked",
    "Training",
    "TrajectoryAverage",
    "harvest",
    "sgd",
    "train",
]
