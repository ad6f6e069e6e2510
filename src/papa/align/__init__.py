"""Permutation symmetries: which units of a network are exchangeable, and how to match them between networks.

Deriving the symmetries of an architecture (`papa.symmetries`):

1. export the graph in evaluation mode with `torch.export` (`derive`);
2. run the graph on labels of units instead of numbers (`propagation`). Each operator says what it does to labels
   (`operators`): an addition joins the units of its operands, a softmax makes a set of them, an unknown operator
   freezes what it touches. `unit_labels` collects these constraints;
3. turn the constraints into groups of exchangeable units (`grouping`), each with all axes of all tensors along which
   its units lie (`unit_groups`);
4. verify every group on a copy with random weights in float64 (`derive`).

Aligning networks of this architecture (`papa.align_`, `papa.align_all_`, `papa.AlignMerges` in `aligning`,
`papa.aligned_soups` in `soup_alignment`):

5. find the permutations that make networks most similar (`matching`): the objective is the correlation of activations
   or the cosine of weights (`objectives`); the search is coordinate ascent with a linear assignment for each group, or
   annealed soft permutations (`search`). Groups inside blocks, such as attention heads, are matched together;
6. permute the networks in place (`permute`).
"""

from papa.align.aligning import AlignMerges, align_, align_all_
from papa.align.derive import symmetries, verify
from papa.align.matching import Alignment
from papa.align.permute import inverse, permute_, permute_all_
from papa.align.soup_alignment import AlignedSoups, aligned_soups
from papa.align.unit_groups import ExportedGraph, Symmetries, TensorAxis, UnitGroup

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
    "permute_",
    "permute_all_",
    "symmetries",
    "verify",
]
