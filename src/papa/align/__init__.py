"""Permutations: which units of a network are exchangeable, and how to match them between networks."""

from papa.align.derive import prove, symmetries
from papa.align.groups import Group, Program, Slot, Symmetries
from papa.align.hook import AlignMerges
from papa.align.matching import Alignment, align_, align_all_
from papa.align.permute import inverse, permute_, permute_all_
from papa.align.soups import AlignedSoups, aligned_soups

__all__ = [
    "AlignMerges",
    "AlignedSoups",
    "Alignment",
    "Group",
    "Program",
    "Slot",
    "Symmetries",
    "align_",
    "align_all_",
    "aligned_soups",
    "inverse",
    "permute_",
    "permute_all_",
    "prove",
    "symmetries",
]
