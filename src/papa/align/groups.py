"""Groups of exchangeable units, and which indices of which tensors each unit owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx

from papa.align.labels import FROZEN, Integers, mixed, rank_in_run
from papa.align.trace import Trace, Within
from papa.errors import PapaError, did_you_mean


@dataclass(frozen=True)
class Slot:
    """Where a group's units live in one tensor."""

    tensor: str
    """The parameter's or buffer's name."""
    axis: int
    """The axis that is permuted."""
    index: Tensor = field(repr=False)
    """Row `u` holds the indices along the axis that unit `u` owns, in order."""
    within: Within = None
    """Only these rows of axis 0 are touched (`start, stop`), as inside one group of a grouped convolution."""

    def __str__(self) -> str:
        return f"{self.tensor} (axis {self.axis})"


@dataclass(frozen=True)
class Group:
    """Units that can be permuted among each other without changing the network's function."""

    name: str
    """The tensor that makes these units, and a number when it makes several groups."""
    size: int
    """How many units."""
    slots: tuple[Slot, ...]
    """All places that have to be permuted together."""
    places: tuple[Slot, ...] = field(default=(), repr=False)
    """Where the units are seen in activations: `tensor` is then the name of a node of the network's graph."""
    is_inner: bool = False
    """Whether its units live inside one block (a head, a group of channels) of another group."""


@dataclass(frozen=True)
class Program:
    """A network's graph, to be run with the tensors of any network of its architecture."""

    graph: fx.GraphModule
    """What `torch.export` gave."""
    tensors: Mapping[str, str]
    """The name of the parameter or buffer that a placeholder takes."""
    constants: Mapping[str, Tensor]
    """The values of the placeholders that take a constant."""


@dataclass(frozen=True)
class Symmetries:
    """All that can be permuted in a network."""

    groups: tuple[Group, ...]
    """Whole blocks and single units first, then units inside of blocks."""
    program: Program | None = field(default=None, repr=False)
    """The graph they were derived from; None when they were written by hand."""

    def __str__(self) -> str:
        return "\n".join(
            f"{group.name}: {group.size} units in {', '.join(str(slot) for slot in group.slots)}"
            for group in self.groups
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise PapaError(f"no group '{name}': {did_you_mean(name, [group.name for group in self.groups])}")


Key = tuple[str, int, Within]


def groups_of(trace: Trace) -> tuple[Group, ...]:
    """The groups that a finished trace implies: first whole blocks and single units, then units inside of blocks."""
    slots = {key: labels.numpy() for key, labels in trace.axes.items()}
    _settle_elements(trace, slots)
    partition = _partition(trace)
    unit, block = partition.unit, partition.block
    owned = np.zeros(trace.ledger.count, dtype=bool)
    for labels in slots.values():
        owned[unit[labels]] = True
    place = _places(unit, block, owned)
    outer = _outer_signatures(partition, slots, place)
    inner = _inner_signatures(partition, slots)
    whole = {key: labels for key, labels in slots.items() if key[2] is None}
    is_unit = owned & (np.arange(len(owned)) == unit)
    num_units = np.bincount(block[is_unit], minlength=len(owned))
    is_outer = (num_units > 0) & (block[FROZEN] != np.arange(len(owned)))
    is_inner = is_unit & (num_units[block] > 1) & (unit[FROZEN] != np.arange(len(owned)))
    seen = {key: labels.numpy() for key, labels in trace.activations.items()}
    found = [
        *_collect(whole, seen, _Owners(block, outer, is_outer), is_inner=False),
        *_collect(slots, seen, _Owners(unit, inner, is_inner), is_inner=True),
    ]
    return _named(found)


@dataclass(frozen=True)
class _Partition:
    """What the labels of a finished trace come to."""

    unit: Integers
    """The unit of each label, named by its smallest label."""
    block: Integers
    """The block of each label, named by its smallest label."""
    colours: list[tuple[Integers, Integers]]
    """Units and numbers: inside a block, only units with the same numbers are exchangeable."""
    kinds: list[tuple[Integers, Integers]]
    """Units and numbers: blocks are exchangeable when their contents, in order, have the same numbers."""


def _partition(trace: Trace) -> _Partition:
    ledger = trace.ledger
    unit = _smallest(ledger.count, ledger.edges)
    colours = [(unit[labels], numbers) for labels, numbers in ledger.colours]
    kinds, links = list(colours), []
    for operator, labels in ledger.sets:
        rows = np.unique(np.where(labels >= 0, unit[labels], labels), axis=0)
        which = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)[rows >= 0]
        units = rows[rows >= 0]
        colours.append((units, mixed(operator, which)))
        kinds.append((units, mixed(operator, np.zeros_like(units))))
        if len(rows) > 1:
            first = np.broadcast_to(rows.max(axis=1, keepdims=True), rows.shape)[rows >= 0]
            links.append(np.stack([units, first]))
    return _Partition(unit, _smallest(ledger.count, [*ledger.edges, *links]), colours, kinds)


def _smallest(count: int, edges: list[Integers]) -> Integers:
    pairs = np.concatenate([np.zeros((2, 0), dtype=np.int64), *edges], axis=1)
    graph = coo_array((np.ones(pairs.shape[1], dtype=np.int8), (pairs[0], pairs[1])), shape=(count, count))
    _, component = connected_components(graph, directed=False)
    smallest = np.full(count, count, dtype=np.int64)
    np.minimum.at(smallest, component, np.arange(count))
    found: Integers = smallest[component]
    return found


def _settle_elements(trace: Trace, slots: dict[Key, Integers]) -> None:
    """Find the axis along which a tensor that was used like an activation is permuted; freeze it if there is none.

    Numbers that were cut off, such as the later rows of a table of positions, go along with those that were not.
    """
    unit = _smallest(trace.ledger.count, trace.ledger.edges)
    is_loose = _untouched(trace, unit)
    for name, elements in trace.elements.items():
        labels = unit[elements.numpy()]
        for axis in sorted(range(labels.ndim), key=lambda axis: -labels.shape[axis]):
            lines = np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)
            first = lines[np.arange(len(lines)), np.argmin(is_loose[lines], axis=1)]
            is_one = (lines == first[:, None]) | is_loose[lines]
            if is_one.all():
                known = slots.setdefault((name, axis, None), first)
                joined = np.broadcast_to(first[:, None], lines.shape)
                trace.ledger.edges += [np.stack([known, first]), np.stack([lines.ravel(), joined.ravel()])]
                break
        else:
            flat = np.unique(labels)
            trace.ledger.edges.append(np.stack([flat, np.zeros_like(flat)]))


def _untouched(trace: Trace, unit: Integers) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which labels met no other and no operator that marks what passes: of numbers that are not used."""
    is_touched = np.bincount(unit, minlength=len(unit))[unit] > 1
    for labels, _ in trace.ledger.colours:
        is_touched[labels] = True
    for _, rows in trace.ledger.sets:
        is_touched[rows[rows >= 0]] = True
    is_touched[FROZEN] = True
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~is_touched
    return found


def _places(unit: Integers, block: Integers, owned: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Integers:
    """Each unit's rank inside its block."""
    units = np.flatnonzero(owned & (np.arange(len(unit)) == unit))
    order, rank = rank_in_run(block[units])
    place = np.zeros(len(unit), dtype=np.int64)
    place[units[order]] = rank
    return place


def _outer_signatures(partition: _Partition, slots: dict[Key, Integers], place: Integers) -> Integers:
    """A number for each block: equal where blocks own the same places in the same order and meet the same constants."""
    unit, block = partition.unit, partition.block
    signature = np.zeros(len(unit), dtype=np.int64)
    for number, (key, labels) in enumerate(slots.items()):
        if key[2] is None:
            order, rank = rank_in_run(block[labels])
            ordered = unit[labels[order]]
            np.add.at(signature, block[ordered], mixed(number, rank, place[ordered]))
    for units, kinds in partition.kinds:
        pairs = np.unique(np.stack([units, kinds]), axis=1)
        np.add.at(signature, block[pairs[0]], mixed(place[pairs[0]], pairs[1]))
    return signature


def _inner_signatures(partition: _Partition, slots: dict[Key, Integers]) -> Integers:
    """A number for each unit: equal inside one block where units own the same places and have the same colours."""
    unit = partition.unit
    signature = mixed(partition.block, np.zeros_like(unit))
    for number, labels in enumerate(slots.values()):
        owners, counts = np.unique(unit[labels], return_counts=True)
        np.add.at(signature, owners, mixed(number, counts))
    for units, colours in partition.colours:
        pairs = np.unique(np.stack([units, colours]), axis=1)
        np.add.at(signature, pairs[0], mixed(np.full_like(pairs[1], -1), pairs[1]))
    return signature


@dataclass(frozen=True)
class _Owners:
    """Units, or blocks, that may become groups."""

    of: Integers
    """The owner of each label."""
    signature: Integers
    """Equal where owners are exchangeable."""
    is_free: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether an owner may move."""


def _collect(slots: dict[Key, Integers], seen: dict[Key, Integers], owners: _Owners, *, is_inner: bool) -> list[Group]:
    """Free owners of equal signature become a group; then each slot is shared out among the groups."""
    free = np.flatnonzero(owners.is_free)
    _, inverse, counts = np.unique(owners.signature[free], return_inverse=True, return_counts=True)
    group_of, rank_of = np.full(len(owners.of), -1), np.zeros(len(owners.of), dtype=np.int64)
    order, rank = rank_in_run(inverse)
    group_of[free], rank_of[free[order]] = np.where(counts[inverse] > 1, inverse, -1), rank
    group_of, rank_of = group_of[owners.of], rank_of[owners.of]
    parts = _shares(slots, group_of, rank_of, counts)
    places = _shares(seen, group_of, rank_of, counts)
    return [
        Group("", int(counts[number]), tuple(found), tuple(places.get(number, [])), is_inner)
        for number, found in parts.items()
    ]


def _shares(
    slots: dict[Key, Integers], group_of: Integers, rank_of: Integers, sizes: Integers
) -> dict[int, list[Slot]]:
    """For each group its part of every slot; where not all of its units have equally many indices it has none."""
    parts: dict[int, list[Slot]] = {}
    for (name, axis, within), labels in slots.items():
        groups = group_of[labels]
        for number in np.unique(groups[groups >= 0]).tolist():
            positions = np.flatnonzero(groups == number)
            by_unit = positions[np.argsort(rank_of[labels[positions]], kind="stable")]
            counts = np.bincount(rank_of[labels[positions]], minlength=sizes[number])
            if (counts == counts[0]).all():
                index = torch.from_numpy(by_unit.reshape(sizes[number], -1))
                parts.setdefault(number, []).append(Slot(name, axis, index, within))
    return parts


def _named(groups: list[Group]) -> tuple[Group, ...]:
    """Each group by the tensor that makes its units; numbered where one tensor makes several."""
    used: dict[str, int] = {}
    named = []
    for group in groups:
        makers = [slot.tensor for slot in group.slots if slot.axis == 0] or [group.slots[0].tensor]
        used[makers[0]] = used.get(makers[0], 0) + 1
        name = makers[0] if used[makers[0]] == 1 else f"{makers[0]}#{used[makers[0]]}"
        named.append(replace(group, name=name))
    return tuple(named)
