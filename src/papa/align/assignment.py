"""Assigning units to units: the best permutation of a group, with those of the units inside its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from papa.align.blocks import Family
from papa.align.groups import Slot, Symmetries
from papa.align.permute import permute_slot_
from papa.streams import stream

GAIN = 1e-9
"""What a family of units must gain to be permuted, in units of one cosine or correlation."""
MOST_ROUNDS = 100
"""How often all families are gone through at most; it is rarely more than ten."""

Orders = dict[str, Tensor]
"""A permutation for each group, by name: whole blocks and single units first, then units inside of blocks."""

Likeness = Callable[[Slot, Tensor], Tensor]
"""How alike unit `i` of the reference and unit `j` of the model are in one slot, where row `i` of the indices is unit
`i`."""


class Matching(Protocol):
    """Two networks in comparison, one of them in working copies that can be permuted."""

    tensors: dict[str, Tensor]
    """What is permuted, by the names that slots have."""

    def likeness(self, slot: Slot, index: Tensor) -> Tensor:
        """How alike unit `i` of the reference and unit `j` of the model are, where row `i` of `index` is unit `i`."""
        ...

    def value(self, name: str) -> float:
        """How alike the two are in one of the tensors, units as they stand."""
        ...


def total(matching: Matching) -> float:
    """How alike the two are in all."""
    return sum(matching.value(name) for name in matching.tensors)


def assign(gain: Tensor) -> Tensor:
    """The permutation with the largest sum of `gain[i, permutation[i]]`."""
    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def family_likeness(family: Family, likeness: Likeness) -> tuple[Tensor, list[Tensor]]:
    """How alike units are: `(n, n)` for the group, and for each piece `(n, n, m, m)`, units within pairs of blocks.

    What belongs to a piece is not counted for the group.
    """
    size = family.group.size
    whole = torch.zeros(size, size, dtype=torch.float64)
    inside = [torch.zeros(size, size, *[piece.groups[0].size] * 2, dtype=torch.float64) for piece in family.pieces]
    for number, slot in enumerate(family.group.slots):
        is_free = torch.ones(slot.index.shape[1], dtype=torch.bool)
        for piece, alike in zip(family.pieces, inside, strict=True):
            columns, num_units = piece.columns[number], piece.groups[0].size
            is_free[columns.flatten()] = False
            if columns.numel():
                index = slot.index[:, columns.flatten()].reshape(size * num_units, -1)
                pairs = likeness(slot, index).double()
                alike += pairs.view(size, num_units, size, num_units).transpose(1, 2)
        if is_free.any():
            whole += likeness(slot, slot.index[:, is_free]).double()
    return whole, inside


def best_orders(family: Family, matching: Matching) -> Orders:
    """The best permutation of a family: units inside every pair of blocks first, then the blocks."""
    whole, inside = family_likeness(family, matching.likeness)
    chosen = []
    for alike in inside:
        orders = [[assign(pair) for pair in row] for row in alike]
        values = [
            [float(pair[torch.arange(len(order)), order].sum()) for pair, order in zip(row, some, strict=True)]
            for row, some in zip(alike, orders, strict=True)
        ]
        whole = whole + torch.tensor(values, dtype=torch.float64)
        chosen.append(orders)
    order = assign(whole)
    return {family.group.name: order} | {
        inner.name: orders[block][int(order[block])]
        for piece, orders in zip(family.pieces, chosen, strict=True)
        for block, inner in enumerate(piece.groups)
    }


def visits_of(families: list[Family]) -> list[Family]:
    """What is gone through in a round.

    Units inside of blocks move with their block's family, and once more on their own: they have places elsewhere.
    """
    return [*families, *(Family(inner) for family in families for inner in list(family.members)[1:])]


def descend_(matching: Matching, families: list[Family], orders: Orders, seed: int) -> int:
    """Give every family in turn its best permutation, all others as they are, until a whole round brings nothing.

    Args:
        matching: permuted in place; its total never falls.
        families: what is matched together.
        orders: composed with what was done.
        seed: of the sequence in which families are gone through.

    Returns:
        The number of rounds.
    """
    visits = visits_of(families)
    for round_ in range(MOST_ROUNDS):
        sequence = torch.randperm(len(visits), generator=stream(seed, "align", position=round_)).tolist()
        gains = [_improve_(matching, visits[number], orders) for number in sequence]
        if not any(gains):
            return round_ + 1
    return MOST_ROUNDS


def _improve_(matching: Matching, family: Family, orders: Orders) -> bool:
    found = best_orders(family, matching)
    if all(torch.equal(order, torch.arange(len(order))) for order in found.values()):
        return False
    touched = {slot.tensor for group in family.members for slot in group.slots}
    kept = {name: matching.tensors[name].clone() for name in touched}
    before = sum(map(matching.value, touched))
    move_(matching, family, found)
    if sum(map(matching.value, touched)) > before + GAIN:
        compose_(orders, family, found)
        return True
    matching.tensors.update(kept)
    return False


def move_(matching: Matching, family: Family, orders: Mapping[str, Tensor]) -> None:
    """Permute the working copies of a family."""
    for group in family.members:
        for slot in group.slots:
            permute_slot_(matching.tensors[slot.tensor], slot, orders[group.name])


def compose_(orders: Orders, family: Family, found: Mapping[str, Tensor]) -> None:
    """Let what was found come after what was done: units inside a block have moved along with it."""
    outer = found[family.group.name]
    orders[family.group.name] = orders[family.group.name][outer]
    for piece in family.pieces:
        before = [orders[inner.name] for inner in piece.groups]
        for block, inner in enumerate(piece.groups):
            orders[inner.name] = before[int(outer[block])][found[inner.name]]


def identity(symmetries: Symmetries) -> Orders:
    """Every group as it is."""
    return {group.name: torch.arange(group.size) for group in symmetries}
