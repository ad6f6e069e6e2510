"""Matching by soft permutations, as in Sinkhorn re-basin, but by coordinate ascent instead of gradient descent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from papa.align.assignment import MIN_GAIN, Permutations, assign, compose_, nested_similarity, with_inner
from papa.align.nesting import NestedGroup
from papa.align.unit_groups import TensorAxis, UnitGroup
from papa.align.weights import WeightComparison, unit_rows
from papa.streams import stream

NUM_ROUNDS = 40
"""The number of rounds over all groups while the temperature falls."""
HOTTEST, COLDEST = 2.0, 0.02
"""The first and last temperature, in units of what one perfectly matched unit adds to a cosine."""
MAX_NORMALISATIONS, TOLERANCE = 60, 1e-3
"""The largest number of normalisations of rows and columns, and the error in log space at which they stop."""


def sinkhorn(logits: Tensor) -> Tensor:
    """The doubly stochastic matrix `P` that maximises `<P, logits> + entropy(P)`, in the log domain.

    Example:
        >>> sinkhorn(torch.tensor([[9.0, 0.0], [0.0, 9.0]])).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    for _ in range(MAX_NORMALISATIONS):
        excess = logits.logsumexp(dim=-1, keepdim=True)
        logits = logits - excess
        logits = logits - logits.logsumexp(dim=-2, keepdim=True)
        if float(excess.abs().max()) < TOLERANCE:
            break
    return logits.exp()


def anneal_(comparison: WeightComparison, groups: list[NestedGroup], permutations: Permutations, seed: int) -> int:
    """Match by soft permutations, rounded to permutations at the end.

    Soft permutations start uniform. Each group in turn gets the soft permutation that maximises

        <reference, P network> + temperature * entropy(P)

    with all others fixed, while the temperature falls. The result is kept if it is a gain. Arguments and result are
    those of `coordinate_ascent_`.
    """
    soft, visits = _SoftPermutations(comparison, groups), with_inner(groups)
    for round_, temperature in enumerate(torch.logspace(0, 1, NUM_ROUNDS, COLDEST / HOTTEST).tolist()):
        for number in torch.randperm(len(visits), generator=stream(seed, "align", position=round_)).tolist():
            soft.update_(visits[number], HOTTEST * temperature)
    found = {name: assign(matrix) for name, matrix in soft.matrices.items()}
    before, kept = comparison.total(), {name: tensor.clone() for name, tensor in comparison.tensors.items()}
    for nested in groups:
        comparison.permute_(nested, found)
    if comparison.total() > before + MIN_GAIN:
        for nested in groups:
            compose_(permutations, nested, found)
    else:
        comparison.tensors.update(kept)
    return NUM_ROUNDS


class _SoftPermutations:
    """A doubly stochastic matrix for each group, starting uniform."""

    def __init__(self, comparison: WeightComparison, nested_groups: list[NestedGroup]) -> None:
        self._comparison = comparison
        groups = [nested.outer for nested in with_inner(nested_groups)]
        self.matrices = {
            group.name: torch.full((group.size, group.size), 1 / group.size, dtype=torch.float64) for group in groups
        }
        self._axes: dict[str, list[tuple[UnitGroup, TensorAxis]]] = {}
        for group in groups:
            for axis in group.axes:
                self._axes.setdefault(axis.tensor, []).append((group, axis))

    def update_(self, nested: NestedGroup, temperature: float) -> None:
        """Give one group its best soft permutation: of the units in every pair of blocks, then of the blocks."""
        permuted: dict[int, Tensor] = {}
        own = self._before_blocks(nested)

        def unit_similarity(axis: TensorAxis, index: Tensor) -> Tensor:
            if id(axis) not in permuted:
                permuted[id(axis)] = self._permuted_elsewhere(axis, own)
            reference = self._comparison.reference[axis.tensor]
            return unit_rows(reference, axis, index) @ unit_rows(permuted[id(axis)], axis, index).T

        similarity, parts = nested_similarity(nested, unit_similarity)
        size, inner_matrices = nested.outer.size, []
        for part in parts:
            matrices = sinkhorn(part * (size * part.shape[-1] / temperature))
            similarity = similarity + (matrices * part).sum(dim=(-1, -2))
            inner_matrices.append(matrices)
        blocks = sinkhorn(similarity * (size / temperature))
        self.matrices[nested.outer.name] = blocks
        for block_part, matrices in zip(nested.parts, inner_matrices, strict=True):
            for block, inner in enumerate(block_part.groups):
                self.matrices[inner.name] = torch.einsum("b,buv->uv", blocks[block], matrices[block])

    def _before_blocks(self, nested: NestedGroup) -> dict[str, Tensor]:
        """The matrices of a nested group, those of inner groups as they were before the blocks moved."""
        blocks = self.matrices[nested.outer.name]
        own = {nested.outer.name: blocks}
        for part in nested.parts:
            inside = torch.stack([self.matrices[inner.name] for inner in part.groups])
            for block, inner in enumerate(part.groups):
                own[inner.name] = torch.einsum("b,buv->uv", blocks[:, block], inside)
        return own

    def _permuted_elsewhere(self, axis: TensorAxis, own: Mapping[str, Tensor]) -> Tensor:
        """The network's tensor, permuted along all axes but this one."""
        tensor = self._comparison.tensors[axis.tensor]
        for group, other in self._axes[axis.tensor]:
            if group.name not in own or other.dim != axis.dim:
                tensor = _permuted(tensor, other, own.get(group.name, self.matrices[group.name]))
        return tensor


def _permuted(tensor: Tensor, axis: TensorAxis, matrix: Tensor) -> Tensor:
    """The tensor with every unit replaced by a weighted mean of units."""
    changed, index = tensor.clone(), axis.index.flatten()
    part = axis.view(changed)
    lines = part.index_select(axis.dim, index).movedim(axis.dim, 0)
    means = (matrix.to(lines.dtype) @ lines.reshape(len(matrix), -1)).view(lines.shape).movedim(0, axis.dim)
    part.index_copy_(axis.dim, index, means)
    return changed
