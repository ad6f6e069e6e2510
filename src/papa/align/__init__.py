"""Permutation symmetries: which units of a network are exchangeable, and how to match them between networks.

Deriving the symmetries of an architecture (`papa.symmetries`):

1. export the graph in evaluation mode with `torch.export` (`derive`);
2. run the graph on labels of units instead of numbers (`labels`). Each operator says what it does to labels
   (`operators`): an addition joins the units of its operands, a softmax makes a set of them, an unknown operator
   freezes what it touches;
3. turn these constraints into groups of exchangeable units (`derive`), each with all axes of all tensors along which
   its units lie (`unit_groups`);
4. verify every group on a copy with random weights in float64 (`derive`).

Aligning networks of this architecture (`papa.align_`, `papa.align_all_`, `papa.AlignMerges`, `papa.aligned_soups` in
`aligning`):

5. find the permutations that make networks most similar (`matching`): the objective is the correlation of activations
   or the cosine of weights (`objectives`); the search is coordinate ascent with a linear assignment for each group, or
   annealed soft permutations. Groups inside blocks, such as attention heads, are matched together;
6. permute the networks in place (`unit_groups`).

All of it is computed on the CPU, whatever the default device.
"""

from papa.align.aligning import AlignedSoups, AlignMerges, align_, align_all_, aligned_soups
from papa.align.derive import symmetries, verify
from papa.align.matching import Alignment
from papa.align.unit_groups import (
    ExportedGraph,
    Symmetries,
    TensorAxis,
    UnitGroup,
    inverse,
    permute_all_,
)

__all__ = [
    "AlignMerges",
    "AlignedSoups",
    "Alignment",
    "ExportedGraph",
    "Symmetries",
    "TensorAxis",
    "UnitGroup",
    "align_",
    "align_all_",
    "aligned_soups",
    "inverse",
    "permute_all_",
    "symmetries",
    "verify",
]
