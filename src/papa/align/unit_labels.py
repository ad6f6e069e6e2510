"""Labels of units, and the constraints that operators put on them.

A label tensor has the shape of the activation or parameter that it describes. Each entry is an integer:

- positive: the unit that this number belongs to;
- 0 (`FROZEN`): the number must stay in its place, as inputs and outputs of the network must;
- negative: a constant, which no permutation changes; equal constants have equal labels.

Labels that an operator joins are one unit, as the two operands of an addition. Dimensions along which labels do not
vary have stride 0 (see `tidy`), which keeps label tensors small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FROZEN = 0
"""The label of everything that must stay in its place."""

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


def tidy(labels: Tensor) -> Tensor:
    """The same labels, with stride 0 along every dimension on which they do not vary."""
    shape = labels.shape
    if labels.numel() == 0:
        return labels
    for dim in range(labels.dim()):
        first = labels.narrow(dim, 0, 1)
        if labels.shape[dim] > 1 and (labels.stride(dim) == 0 or bool((labels == first).all())):
            labels = first
    return labels.expand(shape)


def varies(labels: Tensor, dim: int) -> bool:
    """Whether tidy labels differ along a dimension."""
    return labels.shape[dim] > 1 and labels.stride(dim) != 0


def compact(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape, cut to length 1 along the dimensions on which none of them varies."""
    found = list(tensors)
    for dim in range(tensors[0].dim()):
        if not any(varies(tensor, dim) for tensor in tensors):
            found = [tensor.narrow(dim, 0, min(1, tensor.shape[dim])) for tensor in found]
    return found


def as_rows(labels: Tensor, dims: Sequence[int]) -> Tensor:
    """A matrix with `dims` along its columns and one row for each index of the other dimensions."""
    columns = [dim % labels.dim() for dim in dims]
    kept = [dim for dim in range(labels.dim()) if dim not in columns]
    lines: Tensor = torch.permute(labels, [*kept, *columns])
    return lines.reshape(math.prod(lines.shape[: len(kept)]), -1)


def joint_shape(*shapes: torch.Size) -> torch.Size:
    """The shape that these broadcast to."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _compact_broadcast(*tensors: Tensor) -> list[Tensor]:
    return compact(*torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def hashed(*numbers: Integers | int) -> Integers:
    """An elementwise 64-bit hash of several integers."""
    total = np.asarray(0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            total = (total ^ np.asarray(number).astype(np.int64).view(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            total = (total ^ (total >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            total = total ^ (total >> np.uint64(32))
    return np.asarray(total).view(np.int64)


def rank_among_equal(keys: Integers) -> tuple[Integers, Integers]:
    """A stable order that sorts `keys`, and each sorted entry's rank among those equal to it."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(keys)])
    return order, np.arange(len(keys)) - np.repeat(starts, lengths)


class UncoveredError(RuntimeError):
    """A use of an operator that its rule does not cover: the units it touches stay in place."""


class Constraints:
    """All labels of a network, and what its operators require of them."""

    def __init__(self) -> None:
        self.count = 1
        """The number of labels, `FROZEN` included."""
        self.edges: list[Integers] = []
        """Pairs of labels that are one unit."""
        self.sets: list[tuple[int, Integers]] = []
        """The number of an operator, and a matrix: the operator treats the units of each row as a set."""
        self.colours: list[tuple[Integers, Integers]] = []
        """Labels and their colours: units of different colours are not exchangeable."""
        self._constants: dict[Any, int] = {}
        self._operator = 0

    def next_operator(self) -> None:
        """Colours and sets from now on belong to the next operator."""
        self._operator += 1

    def new_units(self, number: int) -> Tensor:
        """The labels of new units."""
        self.count += number
        return torch.arange(self.count - number, self.count)

    def constant(self, key: Any) -> int:
        """The label of the constant with this key."""
        return self._constants.setdefault(key, -1 - len(self._constants))

    def constants(self, values: Tensor) -> Tensor:
        """The labels of known numbers: equal numbers have equal labels."""
        distinct, inverse = torch.unique(values.detach().double(), return_inverse=True)
        ids = torch.tensor([self.constant(value) for value in distinct.tolist()], dtype=torch.int64)
        return tidy(ids[inverse].reshape(values.shape))

    def join(self, first: Tensor, second: Tensor) -> None:
        """Labels in the same place are one unit; a constant on either side freezes the other."""
        pairs = torch.stack([part.flatten() for part in _compact_broadcast(first, second)])
        self.edges.append(np.unique(pairs.clamp(min=FROZEN).numpy(), axis=1))

    def freeze(self, labels: Tensor) -> None:
        """These units stay in their place."""
        self.join(labels, torch.zeros((), dtype=torch.int64))

    def colour(self, labels: Tensor, values: Tensor) -> None:
        """Units are exchangeable only if this operator gives them the same sequence of values."""
        labels, values = (part.flatten() for part in _compact_broadcast(labels, values))
        is_unit = labels >= 0
        units, seen = labels[is_unit].numpy(), values[is_unit].numpy()
        order, rank = rank_among_equal(units)
        self.colours.append((units[order], hashed(self._operator, rank, seen[order])))

    def mark(self, labels: Tensor) -> None:
        """Units that pass through this operator are exchangeable only with others that do."""
        (small,) = compact(labels)
        units = np.unique(small.numpy())
        units = units[units >= 0]
        self.colours.append((units, hashed(self._operator, np.full_like(units, -2))))

    def add_sets(self, rows: Tensor) -> Tensor:
        """Each row is a set to this operator: units may move within a row, and whole rows may trade places.

        Returns, for every row, which of the distinct rows it is.
        """
        distinct, inverse = torch.unique(rows, dim=0, return_inverse=True)
        self.sets.append((self._operator, distinct.numpy()))
        which: Tensor = inverse
        return which

    def unit_per_set(self, rows: Tensor, which: Tensor) -> Tensor:
        """A new unit for each distinct row, which moves with the units of its row."""
        made = self.new_units(int(which.max()) + 1)
        if len(made) > 1:
            self.add_sets(torch.cat([rows, made[which][:, None]], dim=1))
        return made[which]

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """The labels of an elementwise operator's output, with broadcasting: units in the same place are joined."""
        shape = joint_shape(first.shape, second.shape)
        wide = [part[(None,) * (len(shape) - part.dim())] for part in (first, second)]
        shared = [
            [dim for dim in range(len(shape)) if mine.shape[dim] == 1 and varies(other, dim)]
            for mine, other in (wide, wide[::-1])
        ]
        first, second = (part.expand(shape) for part in wide)
        some, others = compact(first, second)
        if bool((some >= 0).any()) and bool((others >= 0).any()) and (shared[0] or shared[1]):
            self._share(some, others, shared)
            return second if shared[0] else first
        both = (some >= 0) & (others >= 0)
        if bool(both.any()):
            self.join(some[both], others[both])
        for mine, other in ((some, others), (others, some)):
            chosen = (mine >= 0) & (other < 0)
            if bool(chosen.any()):
                self.colour(mine[chosen], other[chosen])
        found = torch.where(some >= 0, some, others)
        neither = (some < 0) & (others < 0)
        if bool(neither.any()):
            pairs, inverse = torch.unique(torch.stack([some[neither], others[neither]]), dim=1, return_inverse=True)
            ids = [self.constant(("both", self.count, *pair)) for pair in pairs.T.tolist()]
            found[neither] = torch.tensor(ids)[inverse]
        return tidy(found.expand(shape))

    def _share(self, some: Tensor, others: Tensor, shared: list[list[int]]) -> None:
        """One number is broadcast to many units: together they are a set."""
        if (shared[0] and shared[1]) or bool((some < 0).any()) or bool((others < 0).any()):
            raise UncoveredError("an outer product of units, or constants among units that share a number")
        few, many, dims = (some, others, shared[0]) if shared[0] else (others, some, shared[1])
        self.add_sets(torch.cat([as_rows(many, dims), as_rows(few, dims)[:, :1]], dim=1))
