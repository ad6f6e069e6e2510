"""Permutations: which units of a network are exchangeable, and how to match them between networks."""

from papa.align.activations import align_by_activations_
from papa.align.derive import symmetries
from papa.align.groups import Group, Program, Slot, Symmetries
from papa.align.matching import Alignment, align_
from papa.align.permute import inverse, permute_, permute_all_

__all__ = [
    "Alignment",
    "Group",
    "Program",
    "Slot",
    "Symmetries",
    "align_",
    "align_by_activations_",
    "inverse",
    "permute_",
    "permute_all_",
    "symmetries",
]
