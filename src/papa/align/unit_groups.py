"""Groups of exchangeable units: where in a network's tensors each unit lies, and which groups lie inside blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from papa.errors import PapaError, did_you_mean


@dataclass(frozen=True)
class TensorAxis:
    """A dimension of a tensor along which the units of a group lie."""

    tensor: str
    """The name of the parameter or buffer."""
    dim: int
    """The dimension that is permuted."""
    index: Tensor = field(repr=False)
    """Row `u` lists the indices along the dimension that belong to unit `u`, in order."""
    row_range: tuple[int, int] | None = None
    """The rows of dimension 0 (start, stop) to permute, as in one group of a grouped convolution; None for all."""

    def __str__(self) -> str:
        return f"{self.tensor} (dim {self.dim})"

    def view(self, tensor: Tensor) -> Tensor:
        """The part of the tensor that is permuted."""
        return tensor if self.row_range is None else tensor[slice(*self.row_range)]


@dataclass(frozen=True)
class UnitGroup:
    """Units that can be permuted among each other without changing the network's function."""

    name: str
    """The tensor that produces these units, with a number when it produces several groups."""
    size: int
    """The number of units."""
    axes: tuple[TensorAxis, ...]
    """All axes of parameters and buffers that have to be permuted together."""
    activations: tuple[TensorAxis, ...] = field(default=(), repr=False)
    """The units in activations: here `tensor` is the name of a node of the exported graph."""
    is_inner: bool = False
    """Whether the units lie inside one block (an attention head, a group of channels) of another group."""


@dataclass(frozen=True)
class ExportedGraph:
    """A network's graph, which runs with the tensors of any network of the same architecture."""

    module: fx.GraphModule
    """The graph that `torch.export` returned."""
    tensors: Mapping[str, str]
    """For each placeholder of a parameter or buffer, its name."""
    constants: Mapping[str, Tensor]
    """For each placeholder of a constant, its value."""


@dataclass(frozen=True)
class Symmetries:
    """All groups of units that can be permuted in a network; `Symmetries(())` keeps every unit in place."""

    groups: tuple[UnitGroup, ...]
    """Blocks and single units first, then units inside blocks."""
    graph: ExportedGraph | None = field(default=None, repr=False)
    """The graph from which they were derived; None when they were written by hand."""

    def __str__(self) -> str:
        return "\n".join(
            f"{group.name}: {group.size} units in {', '.join(str(axis) for axis in group.axes)}"
            for group in self.groups
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[UnitGroup]:
        return iter(self.groups)

    def __getitem__(self, name: str) -> UnitGroup:
        for group in self.groups:
            if group.name == name:
                return group
        raise PapaError(f"no group '{name}': {did_you_mean(name, [group.name for group in self.groups])}")


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
