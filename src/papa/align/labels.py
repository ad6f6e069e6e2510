"""Labels: which numbers of a network's activations and parameters belong to which unit.

A label is an integer. From 0 up it names a unit; labels joined by an edge are one unit, and unit 0 never moves. Below 0
it names a constant: a number that no permutation changes. A label tensor has the shape of what it stands for.
Dimensions along which labels do not vary have stride 0 (see `tidy`), which keeps label tensors small.
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
"""The unit of everything that must stay where it is."""

Integers = NDArray[np.int64]


class UnforeseenError(RuntimeError):
    """A form of an operator that its rule does not cover; never seen outside: what the operator touches is frozen."""


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
    """Tensors of one shape without the dimensions on which none of them varies."""
    found = list(tensors)
    for dim in range(tensors[0].dim()):
        if not any(varies(tensor, dim) for tensor in tensors):
            found = [tensor.narrow(dim, 0, min(1, tensor.shape[dim])) for tensor in found]
    return found


def _broadcast(*tensors: Tensor) -> list[Tensor]:
    return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def joint_shape(*shapes: torch.Size) -> torch.Size:
    """The shape that these broadcast to."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def mixed(*numbers: Integers | int) -> Integers:
    """A hash of several integers, elementwise: equal tuples alike, others apart but for one chance in 2^64."""
    total = np.asarray(0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            total = (total ^ np.asarray(number).astype(np.int64).view(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            total = (total ^ (total >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            total = total ^ (total >> np.uint64(32))
    return np.asarray(total).view(np.int64)


def rank_in_run(keys: Integers) -> tuple[Integers, Integers]:
    """A stable order that sorts `keys`, and each sorted entry's rank among the equal ones."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(keys)])
    return order, np.arange(len(keys)) - np.repeat(starts, lengths)


class Ledger:
    """All labels of a network, and what is known about them."""

    def __init__(self) -> None:
        self.count = 1
        self.edges: list[Integers] = []
        """Pairs of labels that are one unit."""
        self.sets: list[tuple[int, Integers]] = []
        """An operator's number and a matrix: the units of each row are a set to it."""
        self.colours: list[tuple[Integers, Integers]] = []
        """Labels and a number: units with different numbers are not exchangeable."""
        self._constants: dict[Any, int] = {}
        self._operator = 0

    def fresh(self, number: int) -> Tensor:
        """New units."""
        self.count += number
        return torch.arange(self.count - number, self.count)

    def next_operator(self) -> None:
        """What follows belongs to another operator: its colours are its own."""
        self._operator += 1

    def constant(self, key: Any) -> int:
        """The label of a constant, by whatever tells it apart."""
        return self._constants.setdefault(key, -1 - len(self._constants))

    def constants(self, values: Tensor) -> Tensor:
        """The labels of numbers that are known: equal numbers, equal labels."""
        distinct, inverse = torch.unique(values.detach().double(), return_inverse=True)
        ids = torch.tensor([self.constant(value) for value in distinct.tolist()], dtype=torch.int64)
        return tidy(ids[inverse].reshape(values.shape))

    def join(self, first: Tensor, second: Tensor) -> None:
        """Make units one; a constant on either side freezes the other."""
        pairs = torch.stack([part.flatten() for part in compact(*_broadcast(first, second))])
        self.edges.append(np.unique(pairs.clamp(min=FROZEN).numpy(), axis=1))

    def freeze(self, labels: Tensor) -> None:
        """These units never move."""
        self.join(labels, torch.zeros((), dtype=torch.int64))

    def colour(self, labels: Tensor, values: Tensor) -> None:
        """Units are exchangeable only when they meet the same sequence of values here."""
        labels, values = (part.flatten() for part in compact(*_broadcast(labels, values)))
        chosen = labels >= 0
        units, seen = labels[chosen].numpy(), values[chosen].numpy()
        order, rank = rank_in_run(units)
        self.colours.append((units[order], mixed(self._operator, rank, seen[order])))

    def mark(self, labels: Tensor) -> None:
        """Units that pass through this operator are exchangeable only with others that do."""
        (small,) = compact(labels)
        units = np.unique(small.numpy())
        units = units[units >= 0]
        self.colours.append((units, mixed(self._operator, np.full_like(units, -2))))

    def block(self, rows: Tensor) -> Tensor:
        """Each row is used as a set: units may move within a row, and whole rows may change places.

        Returns:
            For every row, which of the distinct rows it is.
        """
        distinct, inverse = torch.unique(rows, dim=0, return_inverse=True)
        self.sets.append((self._operator, distinct.numpy()))
        which: Tensor = inverse
        return which

    def rows(self, labels: Tensor, dims: Sequence[int]) -> Tensor:
        """The labels as a matrix: one row for each index of the other dimensions, `dims` along the columns."""
        wanted = [dim % labels.dim() for dim in dims]
        kept = [dim for dim in range(labels.dim()) if dim not in wanted]
        (small,) = compact(labels)
        lines: Tensor = torch.permute(small, [*kept, *wanted])
        rows: Tensor = lines.reshape(math.prod(lines.shape[: len(kept)]), -1)
        return rows
