"""Activation statistics: REPAIR after weights were averaged, and BatchNorm re-estimated."""

from papa.repair.batch_norm import reset_batch_norm_
from papa.repair.hook import BatchesFor, RepairMerges, ResetBatchNormAfterMerges
from papa.repair.repair import RepairReport, goals_of, repair_, repair_plan, repair_toward_
from papa.repair.statistics import ChannelStatistics, layer_statistics, repairable_layers

__all__ = [
    "BatchesFor",
    "ChannelStatistics",
    "RepairMerges",
    "RepairReport",
    "ResetBatchNormAfterMerges",
    "goals_of",
    "layer_statistics",
    "repair_",
    "repair_plan",
    "repair_toward_",
    "repairable_layers",
    "reset_batch_norm_",
]
