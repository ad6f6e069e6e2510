"""Which groups live inside the blocks of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from papa.align.groups import Group, Slot, Symmetries


@dataclass(frozen=True)
class Piece:
    """Units that every block of a group has in the same places, such as the values of each head."""

    groups: tuple[Group, ...]
    """For each block, the group of these units inside it."""
    columns: tuple[Tensor, ...]
    """For each slot of the outer group, which columns of its index each unit takes: one row per unit."""


def pieces_of(group: Group, symmetries: Symmetries) -> list[Piece]:
    """The pieces that the blocks of a group are made of; what belongs to none moves with its block as it is."""
    found: dict[tuple[tuple[int, ...], ...], dict[int, tuple[Group, tuple[Tensor, ...]]]] = {}
    owners = [_owners(slot) for slot in group.slots]
    for inner in symmetries:
        if not inner.is_inner:
            continue
        home = _home(inner, group, owners)
        if home is not None:
            block, columns = home
            key = tuple(tuple(part.flatten().tolist()) for part in columns)
            found.setdefault(key, {})[block] = inner, columns
    return [
        Piece(tuple(members[block][0] for block in range(group.size)), members[0][1])
        for members in found.values()
        if len(members) == group.size
    ]


def _owners(slot: Slot) -> tuple[Tensor, Tensor]:
    """For each index along the axis, the unit that owns it (-1 if none) and the column it has there."""
    length = int(slot.index.max()) + 1
    owner, column = torch.full((length,), -1), torch.zeros(length, dtype=torch.int64)
    owner[slot.index] = torch.arange(len(slot.index))[:, None].expand_as(slot.index)
    column[slot.index] = torch.arange(slot.index.shape[1]).expand_as(slot.index)
    return owner, column


def _home(inner: Group, group: Group, owners: list[tuple[Tensor, Tensor]]) -> tuple[int, tuple[Tensor, ...]] | None:
    """The block that holds a group, and its columns in each slot; None when it lives elsewhere."""
    slots = {(slot.tensor, slot.axis): slot.index for slot in inner.slots if slot.within is None}
    block, columns = -1, []
    for slot, (owner, column) in zip(group.slots, owners, strict=True):
        index = slots.get((slot.tensor, slot.axis))
        if index is None:
            columns.append(torch.zeros(inner.size, 0, dtype=torch.int64))
            continue
        if int(index.max()) >= len(owner):
            return None
        rows = owner[index]
        if bool((rows != rows[0, 0]).any()) or int(rows[0, 0]) < 0 or block not in (-1, int(rows[0, 0])):
            return None
        block = int(rows[0, 0])
        columns.append(column[index])
    return (block, tuple(columns)) if block >= 0 else None


@dataclass(frozen=True)
class Family:
    """Units that are matched together: a group, and the units inside its blocks."""

    group: Group
    pieces: tuple[Piece, ...] = ()

    @property
    def members(self) -> Iterator[Group]:
        """The group itself, then those inside its blocks."""
        yield self.group
        for piece in self.pieces:
            yield from piece.groups


def families_of(symmetries: Symmetries) -> list[Family]:
    """Every group that lives in no block of another, each with what its blocks are made of.

    Units inside a block that the other blocks do not have likewise are in no family: they move with their block.
    """
    families = [Family(group, tuple(pieces_of(group, symmetries))) for group in symmetries if not group.is_inner]
    owners = [(family.group, [_owners(slot) for slot in family.group.slots]) for family in families]
    lone = [
        Family(inner)
        for inner in symmetries
        if inner.is_inner and not any(_home(inner, group, owner) for group, owner in owners)
    ]
    return families + lone
