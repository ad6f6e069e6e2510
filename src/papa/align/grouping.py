"""From the constraints that a graph puts on labels to the groups of exchangeable units.

1. Labels joined by edges are one unit. Sets link units into blocks: the units of several sets of one operator, such as
   the heads of an attention layer, may only move together with their set.
2. Every block and every unit gets a signature, a hash of all it must have in common with the others to be exchangeable:
   the axes it lies on and the colours of its labels.
3. Blocks of equal signature form a group; so do units of equal signature inside one block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from papa.align.propagation import AxisKey, LabelPropagation
from papa.align.unit_groups import TensorAxis, UnitGroup
from papa.align.unit_labels import FROZEN, Booleans, Constraints, Integers, hashed, rank_among_equal


def unit_groups(graph: LabelPropagation) -> tuple[UnitGroup, ...]:
    """The groups that a propagated graph implies: blocks and single units first, then units inside blocks."""
    axes = {key: labels.numpy() for key, labels in graph.axes.items()}
    _add_element_axes(graph, axes)
    partition = _partition(graph.constraints)
    unit, block = partition.unit, partition.block
    labels = np.arange(len(unit))
    is_owned = np.zeros(len(unit), dtype=bool)
    for found in axes.values():
        is_owned[unit[found]] = True
    is_unit = is_owned & (labels == unit)
    num_units = np.bincount(block[is_unit], minlength=len(unit))
    activations = {key: found.numpy() for key, found in graph.activations.items()}
    outer = _collect(
        {key: found for key, found in axes.items() if key[2] is None},
        activations,
        owner=block,
        signature=_block_signatures(partition, axes, is_unit),
        is_free=(num_units > 0) & (block[FROZEN] != labels),
    )
    inner = _collect(
        axes,
        activations,
        owner=unit,
        signature=_unit_signatures(partition, axes),
        is_free=is_unit & (num_units[block] > 1) & (unit[FROZEN] != labels),
    )
    return _named([*outer, *(replace(group, is_inner=True) for group in inner)])


@dataclass(frozen=True)
class _Partition:
    """The units and blocks that labels form, each named by its smallest label."""

    unit: Integers
    """The unit of each label."""
    block: Integers
    """The block of each label."""
    unit_colours: list[tuple[Integers, Integers]]
    """Units and colours: inside a block, only units of the same colours are exchangeable."""
    block_colours: list[tuple[Integers, Integers]]
    """Units and colours: blocks are exchangeable if their units, in order, have the same colours."""


def _partition(constraints: Constraints) -> _Partition:
    unit = _components(constraints.count, constraints.edges)
    colours = [(unit[labels], numbers) for labels, numbers in constraints.colours]
    block_colours, links = list(colours), []
    for operator, labels in constraints.sets:
        rows = np.unique(np.where(labels >= 0, unit[labels], labels), axis=0)
        which = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)[rows >= 0]
        units = rows[rows >= 0]
        colours.append((units, hashed(operator, which)))
        block_colours.append((units, hashed(operator, np.zeros_like(units))))
        if len(rows) > 1:
            first = np.broadcast_to(rows.max(axis=1, keepdims=True), rows.shape)[rows >= 0]
            links.append(np.stack([units, first]))
    block = _components(constraints.count, [*constraints.edges, *links])
    return _Partition(unit, block, colours, block_colours)


def _components(count: int, edges: list[Integers]) -> Integers:
    """The connected component of each label, named by its smallest label."""
    first, second = np.concatenate([np.zeros((2, 0), dtype=np.int64), *edges], axis=1)
    from scipy.sparse import coo_array, csgraph  # slow to import, and needed only by alignment

    graph = coo_array((np.ones(len(first), dtype=np.int8), (first, second)), (count, count))
    _, component = csgraph.connected_components(graph, directed=False)
    smallest = np.full(count, count, dtype=np.int64)
    np.minimum.at(smallest, component, np.arange(count))
    found: Integers = smallest[component]
    return found


def _add_element_axes(graph: LabelPropagation, axes: dict[AxisKey, Integers]) -> None:
    """For each parameter used like an activation, find the axis along which its units lie; freeze it if there is none.

    Numbers that the graph does not use, such as the last rows of a table of positions, move with those it uses.
    """
    constraints = graph.constraints
    unit = _components(constraints.count, constraints.edges)
    is_unused = _unused(constraints, unit)
    for name, elements in graph.elements.items():
        labels = unit[elements.numpy()]
        for dim in sorted(range(labels.ndim), key=lambda dim: -labels.shape[dim]):
            lines = np.moveaxis(labels, dim, 0).reshape(labels.shape[dim], -1)
            first = lines[np.arange(len(lines)), np.argmin(is_unused[lines], axis=1)]
            if ((lines == first[:, None]) | is_unused[lines]).all():
                known = axes.setdefault((name, dim, None), first)
                joined = np.broadcast_to(first[:, None], lines.shape)
                constraints.edges += [np.stack([known, first]), np.stack([lines.ravel(), joined.ravel()])]
                break
        else:
            flat = np.unique(labels)
            constraints.edges.append(np.stack([flat, np.zeros_like(flat)]))


def _unused(constraints: Constraints, unit: Integers) -> Booleans:
    """Whether a label has no edge, no colour and is in no set."""
    is_used = np.bincount(unit, minlength=len(unit))[unit] > 1
    for labels, _ in constraints.colours:
        is_used[labels] = True
    for _, rows in constraints.sets:
        is_used[rows[rows >= 0]] = True
    is_used[FROZEN] = True
    found: Booleans = ~is_used
    return found


def _block_signatures(partition: _Partition, axes: dict[AxisKey, Integers], is_unit: Booleans) -> Integers:
    """Equal for blocks that lie on the same axes in the same order and have the same colours."""
    unit, block = partition.unit, partition.block
    units = np.flatnonzero(is_unit)
    order, rank = rank_among_equal(block[units])
    rank_in_block = np.zeros(len(unit), dtype=np.int64)
    rank_in_block[units[order]] = rank
    signature = np.zeros(len(unit), dtype=np.int64)
    for number, (key, labels) in enumerate(axes.items()):
        if key[2] is None:
            order, rank = rank_among_equal(block[labels])
            ordered = unit[labels[order]]
            np.add.at(signature, block[ordered], hashed(number, rank, rank_in_block[ordered]))
    for owners, colours in partition.block_colours:
        pairs = np.unique(np.stack([owners, colours]), axis=1)
        np.add.at(signature, block[pairs[0]], hashed(rank_in_block[pairs[0]], pairs[1]))
    return signature


def _unit_signatures(partition: _Partition, axes: dict[AxisKey, Integers]) -> Integers:
    """Equal for units of one block that lie on the same axes and have the same colours."""
    signature = hashed(partition.block, np.zeros_like(partition.unit))
    for number, labels in enumerate(axes.values()):
        owners, counts = np.unique(partition.unit[labels], return_counts=True)
        np.add.at(signature, owners, hashed(number, counts))
    for units, colours in partition.unit_colours:
        pairs = np.unique(np.stack([units, colours]), axis=1)
        np.add.at(signature, pairs[0], hashed(np.full_like(pairs[1], -1), pairs[1]))
    return signature


def _collect(
    axes: dict[AxisKey, Integers],
    activations: dict[AxisKey, Integers],
    *,
    owner: Integers,
    signature: Integers,
    is_free: Booleans,
) -> list[UnitGroup]:
    """A group for all free owners (units or blocks) of equal signature, and its share of every axis."""
    free = np.flatnonzero(is_free)
    _, inverse, counts = np.unique(signature[free], return_inverse=True, return_counts=True)
    group_of, rank_of = np.full(len(owner), -1), np.zeros(len(owner), dtype=np.int64)
    order, rank = rank_among_equal(inverse)
    group_of[free], rank_of[free[order]] = np.where(counts[inverse] > 1, inverse, -1), rank
    group_of, rank_of = group_of[owner], rank_of[owner]
    found, seen = (_shares(some, group_of, rank_of, counts) for some in (axes, activations))
    return [
        UnitGroup("", int(counts[number]), tuple(its_axes), tuple(seen.get(number, [])))
        for number, its_axes in found.items()
    ]


def _shares(
    axes: dict[AxisKey, Integers], group_of: Integers, rank_of: Integers, sizes: Integers
) -> dict[int, list[TensorAxis]]:
    """Each group's part of every axis, left out where its units do not all have the same number of indices."""
    shares: dict[int, list[TensorAxis]] = {}
    for (name, dim, row_range), labels in axes.items():
        groups = group_of[labels]
        for number in np.unique(groups[groups >= 0]).tolist():
            positions = np.flatnonzero(groups == number)
            ranks = rank_of[labels[positions]]
            counts = np.bincount(ranks, minlength=sizes[number])
            if (counts == counts[0]).all():
                by_unit = positions[np.argsort(ranks, kind="stable")]
                index = torch.from_numpy(by_unit.reshape(sizes[number], -1))
                shares.setdefault(number, []).append(TensorAxis(name, dim, index, row_range))
    return shares


def _named(groups: list[UnitGroup]) -> tuple[UnitGroup, ...]:
    """Name each group after the tensor that produces its units, with a number if the name is taken."""
    used: dict[str, int] = {}
    named = []
    for group in groups:
        name = next((axis.tensor for axis in group.axes if axis.dim == 0), group.axes[0].tensor)
        used[name] = used.get(name, 0) + 1
        named.append(replace(group, name=name if used[name] == 1 else f"{name}#{used[name]}"))
    return tuple(named)
