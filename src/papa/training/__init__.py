"""Training a population: the loop, what it ends with, and `papa.train`."""

from papa.training.entry import sgd, train
from papa.training.freezing import FrozenBody
from papa.training.loop import Augment, Engine, EpochRecord, Hook, Length, Numerics, Training
from papa.training.merging import Merging
from papa.training.outcome import Outcome, Scores, harvest
from papa.training.probes import MergeProbes
from papa.training.stacked import Stacked

__all__ = [
    "Augment",
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
    "harvest",
    "sgd",
    "train",
]
