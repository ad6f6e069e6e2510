"""Coordinate ascent over groups: the best permutation of one group, all others fixed, is a linear assignment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from papa.align.nesting import NestedGroup
from papa.align.permute import permute_axis_
from papa.align.unit_groups import Symmetries, TensorAxis
from papa.streams import stream

MIN_GAIN = 1e-9
"""The similarity that a permutation must gain to be kept, in units of one cosine or correlation."""
MAX_ROUNDS = 100
"""The largest number of rounds over all groups; more than ten are rare."""

Permutations = dict[str, Tensor]
"""A permutation for each group, by name: blocks and single units first, then units inside blocks."""


class Comparison(ABC):
    """A network, as working copies that can be permuted, and the reference it is compared with."""

    tensors: dict[str, Tensor]
    """The working copies, by the name that a `TensorAxis` has."""

    @abstractmethod
    def unit_similarity(self, axis: TensorAxis, index: Tensor) -> Tensor:
        """The similarity of each unit of the reference to each unit of the network; row `i` of `index` is unit `i`."""

    @abstractmethod
    def similarity(self, name: str) -> float:
        """The similarity of one tensor to the reference's, in the present order of units."""

    def total(self) -> float:
        """The sum of similarities over all tensors."""
        return sum(map(self.similarity, self.tensors))

    def permute_(self, nested: NestedGroup, permutations: Mapping[str, Tensor]) -> None:
        """Permute the working copies."""
        for group in (nested.outer, *nested.inner):
            for axis in group.axes:
                permute_axis_(self.tensors[axis.tensor], axis, permutations[group.name])


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

    Args:
        comparison: permuted in place; its total never decreases.
        groups: the groups to permute.
        permutations: composed in place with the permutations that were made.
        seed: of the order of groups in each round.

    Returns:
        The number of rounds.
    """
    visits = with_inner(groups)
    for round_ in range(MAX_ROUNDS):
        sequence = torch.randperm(len(visits), generator=stream(seed, "align", position=round_)).tolist()
        gains = [_improve_(comparison, visits[number], permutations) for number in sequence]
        if not any(gains):
            return round_ + 1
    return MAX_ROUNDS


def _improve_(comparison: Comparison, nested: NestedGroup, permutations: Permutations) -> bool:
    found = best_permutations(nested, comparison)
    if all(torch.equal(order, torch.arange(len(order))) for order in found.values()):
        return False
    touched = dict.fromkeys(axis.tensor for group in (nested.outer, *nested.inner) for axis in group.axes)
    kept = {name: comparison.tensors[name].clone() for name in touched}
    before = sum(map(comparison.similarity, touched))
    comparison.permute_(nested, found)
    if sum(map(comparison.similarity, touched)) > before + MIN_GAIN:
        compose_(permutations, nested, found)
        return True
    comparison.tensors.update(kept)
    return False


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
