"""Which groups of units lie inside the blocks of another group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from papa.align.unit_groups import Symmetries, TensorAxis, UnitGroup


@dataclass(frozen=True)
class BlockPart:
    """Units that every block of a group has in the same places, such as the value units of each attention head."""

    groups: tuple[UnitGroup, ...]
    """For each block, the group of these units inside it."""
    columns: tuple[Tensor, ...]
    """For each axis of the outer group, one row per unit: the columns of the axis's index that the unit takes."""


@dataclass(frozen=True)
class NestedGroup:
    """Units that are matched together: a group, and the units inside its blocks if it has any."""

    outer: UnitGroup
    parts: tuple[BlockPart, ...] = ()

    @property
    def inner(self) -> list[UnitGroup]:
        """The groups inside the blocks."""
        return [group for part in self.parts for group in part.groups]


def nested_groups(symmetries: Symmetries) -> list[NestedGroup]:
    """Every group that lies in no block of another, each with the units inside its blocks.

    Units of a block that have no counterpart in the other blocks are left out: they move with their block.
    """
    alone = {group.name: group for group in symmetries if group.is_inner}
    inner_groups, found = list(alone.values()), []
    for outer in symmetries:
        if outer.is_inner:
            continue
        owners = [_owners(axis) for axis in outer.axes]
        parts: dict[tuple[tuple[int, ...], ...], dict[int, tuple[UnitGroup, tuple[Tensor, ...]]]] = {}
        for inner in inner_groups:
            place = _place(inner, outer, owners)
            if place is not None:
                block, columns = place
                key = tuple(tuple(part.flatten().tolist()) for part in columns)
                parts.setdefault(key, {})[block] = inner, columns
                alone.pop(inner.name, None)
        complete = [
            BlockPart(tuple(blocks[block][0] for block in range(outer.size)), blocks[0][1])
            for blocks in parts.values()
            if len(blocks) == outer.size
        ]
        found.append(NestedGroup(outer, tuple(complete)))
    return found + [NestedGroup(inner) for inner in alone.values()]


def _owners(axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """For each index along an axis, the unit that owns it (-1 if none) and its column in the axis's index."""
    length = int(axis.index.max()) + 1
    owner, column = torch.full((length,), -1), torch.zeros(length, dtype=torch.int64)
    owner[axis.index] = torch.arange(len(axis.index))[:, None].expand_as(axis.index)
    column[axis.index] = torch.arange(axis.index.shape[1]).expand_as(axis.index)
    return owner, column


def _place(
    inner: UnitGroup, outer: UnitGroup, owners: list[tuple[Tensor, Tensor]]
) -> tuple[int, tuple[Tensor, ...]] | None:
    """The block that contains an inner group, and the group's columns on each axis; None if no block does."""
    index_of = {(axis.tensor, axis.dim): axis.index for axis in inner.axes if axis.row_range is None}
    block, columns = -1, []
    for axis, (owner, column) in zip(outer.axes, owners, strict=True):
        index = index_of.get((axis.tensor, axis.dim))
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
