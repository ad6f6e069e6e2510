"""Training a population: `papa.train`, its options and callbacks, the loop, checkpoints, and the outcome."""

from papa.training.callbacks import Callback, EpochRecord, EpochScores, Log
from papa.training.entry import start_training, train
from papa.training.loop import Training
from papa.training.options import (
    Align,
    Augment,
    AveragingOptions,
    Engine,
    Length,
    Monitoring,
    Numerics,
    Repair,
    Settings,
    Transforms,
    sgd,
)
from papa.training.outcome import BestSoup, Outcome, Scores, finalize
from papa.training.saving import CheckpointOptions
from papa.training.stacked import Stacked
from papa.training.trajectory import TrajectoryAverage

__all__ = [
    "Align",
    "Augment",
    "AveragingOptions",
    "BestSoup",
    "Callback",
    "CheckpointOptions",
    "Engine",
    "EpochRecord",
    "EpochScores",
    "Length",
    "Log",
    "Monitoring",
    "Numerics",
    "Outcome",
    "Repair",
    "Scores",
    "Settings",
    "Stacked",
    "Training",
    "TrajectoryAverage",
    "Transforms",
    "finalize",
    "sgd",
    "start_training",
    "train",
]
