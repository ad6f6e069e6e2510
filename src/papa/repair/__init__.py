"""REPAIR of averaged networks, and re-estimation of BatchNorm statistics."""

from papa.repair.repair import (
    BatchesFor,
    RepairMerges,
    RepairReport,
    ResetBatchNormAfterMerges,
    Scope,
    goals_of,
    repair_,
    repair_plan,
    repair_toward_,
    repair_toward_members,
)
from papa.repair.statistics import ChannelStatistics, layer_statistics, repairable_layers, reset_batch_norm_

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
    "repair_toward_members",
    "repairable_layers",
    "reset_batch_norm_",
]
