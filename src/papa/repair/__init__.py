"""REPAIR of averaged networks, and re-estimation of BatchNorm statistics."""

from papa.repair.batch_norm import reset_batch_norm_
from papa.repair.hook import BatchesFor, RepairMerges, ResetBatchNormAfterMerges
from papa.repair.repair import RepairReport, Scope, goals_of, repair_, repair_plan, repair_toward_
from papa.repair.statistics import ChannelStatistics, layer_statistics, repairable_layers

__all__ = [
    "BatchesFor",
    "ChannelStatistics",
    "RepairMerges",
    "RepairReport",
    "ResetBatchNormAfterMerges",
    "Scope",
    "goals_of",
    "layer_statistics",
    "repair_",
    "repair_plan",
    "repair_toward_",
    "repairable_layers",
    "reset_batch_norm_",
]
