"""Searching the best permutations: by coordinate ascent over groups, or by annealed soft permutations (Sinkhorn)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from papa.align.objectives import Comparison, WeightComparison, unit_rows
from papa.align.permute import Permutations
from papa.align.unit_groups import NestedGroup, Symmetries, TensorAxis, UnitGroup
from papa.streams import stream

MIN_GAIN = 1e-9
"""The similarity that a permutation must gain to be kept, in units of one cosine or correlation."""
MAX_ROUNDS = 100
"""The largest number of rounds of coordinate ascent; more than ten are rare."""
NUM_ROUNDS = 40
"""The number of rounds of annealing, while the temperature falls."""
HOTTEST, COLDEST = 2.0, 0.02
"""The first and last temperature, in units of what one perfectly matched unit adds to a cosine."""
MAX_NORMALISATIONS, TOLERANCE = 60, 1e-3
"""The largest number of normalisations of rows and columns, and the error in log space at which they stop."""


def assign(gain: Tensor) -> Tensor:
    """The permutation with the largest sum of `gain[i, permutation[i]]`."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and needed only by alignment

    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def nested_similarity(
    nested: NestedGroup, unit_similarity: Callable[[TensorAxis, Tensor], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The similarity of `n` blocks, `(n, n)`, and of the `m` units of each part in pairs of blocks, `(n, n, m, m)`.

    Numbers that belong to a part are not counted for the blocks.
    """
    size = nested.outer.size
    blocks = torch.zeros(size, size, dtype=torch.float64)
    parts = [torch.zeros(size, size, *[part.groups[0].size] * 2, dtype=torch.float64) for part in nested.parts]
    for number, axis in enumerate(nested.outer.axes):
        is_free = torch.ones(axis.index.shape[1], dtype=torch.bool)
        for part, similarity in zip(nested.parts, parts, strict=True):
            columns, num_units = part.columns[number], part.groups[0].size
            is_free[columns.flatten()] = False
            if columns.numel():
                index = axis.index[:, columns.flatten()].reshape(size * num_units, -1)
                pairs = unit_similarity(axis, index).double()
                similarity += pairs.view(size, num_units, size, num_units).transpose(1, 2)
        if is_free.any():
            blocks += unit_similarity(axis, axis.index[:, is_free]).double()
    return blocks, parts


def best_permutations(nested: NestedGroup, comparison: Comparison) -> Permutations:
    """The best permutation of the units in every pair of blocks, then of the blocks."""
    blocks, parts = nested_similarity(nested, comparison.unit_similarity)
    assigned = []
    for similarity in parts:
        orders = [[assign(pair) for pair in row] for row in similarity]
        values = [
            [float(pair[torch.arange(len(order)), order].sum()) for pair, order in zip(*rows, strict=True)]
            for rows in zip(similarity, orders, strict=True)
        ]
        blocks = blocks + torch.tensor(values, dtype=torch.float64)
        assigned.append(orders)
    order = assign(blocks)
    return {nested.outer.name: order} | {
        inner.name: orders[block][int(order[block])]
        for part, orders in zip(nested.parts, assigned, strict=True)
        for block, inner in enumerate(part.groups)
    }


def with_inner(groups: list[NestedGroup]) -> list[NestedGroup]:
    """All groups, then the inner ones once more by themselves, since their units lie on further axes."""
    return [*groups, *(NestedGroup(inner) for nested in groups for inner in nested.inner)]


def coordinate_ascent_(comparison: Comparison, groups: list[NestedGroup], permutations: Permutations, seed: int) -> int:
    """Give each group in turn its best permutation, all others fixed, until a whole round gains nothing.

    The comparison is permuted in place, and `permutations` composed with what was done. Returns the number of rounds.
    """
    visits = with_inner(groups)
    for round_ in range(MAX_ROUNDS):
        sequence = torch.randperm(len(visits), generator=stream(seed, "align", position=round_)).tolist()
        gains = []
        for nested in (visits[number] for number in sequence):
            gains.append(_keep_if_gain_(comparison, [nested], best_permutations(nested, comparison), permutations))
        if not any(gains):
            return round_ + 1
    return MAX_ROUNDS


def _keep_if_gain_(
    comparison: Comparison, groups: list[NestedGroup], found: Permutations, permutations: Permutations
) -> bool:
    """Permute some groups, and undo it unless the similarity rises."""
    if all(torch.equal(order, torch.arange(len(order))) for order in found.values()):
        return False
    axes = [axis for nested in groups for group in (nested.outer, *nested.inner) for axis in group.axes]
    kept = {name: comparison.tensors[name].clone() for name in dict.fromkeys(axis.tensor for axis in axes)}
    before = sum(map(comparison.similarity, kept))
    for nested in groups:
        comparison.permute_(nested, found)
    if sum(map(comparison.similarity, kept)) <= before + MIN_GAIN:
        comparison.tensors.update(kept)
        return False
    for nested in groups:
        compose_(permutations, nested, found)
    return True


def compose_(permutations: Permutations, nested: NestedGroup, found: Mapping[str, Tensor]) -> None:
    """Append the permutations that were found to those made before; units inside a block have moved with it."""
    outer = found[nested.outer.name]
    permutations[nested.outer.name] = permutations[nested.outer.name][outer]
    for part in nested.parts:
        before = [permutations[inner.name] for inner in part.groups]
        for block, inner in enumerate(part.groups):
            permutations[inner.name] = before[int(outer[block])][found[inner.name]]


def identity(symmetries: Symmetries) -> Permutations:
    """The permutations that move nothing."""
    return {group.name: torch.arange(group.size) for group in symmetries}


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
    _keep_if_gain_(comparison, groups, found, permutations)
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
            reference = self._comparison.reference(axis.tensor)
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
