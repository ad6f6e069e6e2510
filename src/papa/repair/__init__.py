"""Activation statistics: REPAIR after weights were averaged, and BatchNorm re-estimated."""

from papa.repair.batch_norm import reset_batch_norm_
from papa.repair.merging import BatchesFor, RepairMerges, ResetBatchNormAfterMerges
from papa.repair.moments import Moments, layer_moments, repairable_layers
from papa.repair.repair import RepairReport, goals_of, repair_, repair_plan, repair_toward_

__all__ = [
    "BatchesFor",
    "Moments",
    "RepairMerges",
    "RepairReport",
    "ResetBatchNormAfterMerges",
    "goals_of",
    "layer_moments",
    "repair_",
    "repair_plan",
    "repair_toward_",
    "repairable_layers",
    "reset_batch_norm_",
]
