"""What the averager measures of members before it mixes them: their distances to the mean, and whether they are finite.

Everything is computed where the members are. The numbers are then read in one go, since every read from an
accelerator waits until it has finished its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from papa.core.population import Population
from papa.core.row_measures import row_sums


@dataclass(frozen=True)
class Measured:
    """The distances of all members, and which local members are finite."""

    distances: tuple[float, ...] | None
    """Each member's distance to the mean; None if not measured."""
    are_finite: tuple[bool, ...]
    """Of each local member, whether all its numbers are finite. False may also be due to an overflow in a sum."""
    watched: tuple[float, ...] = ()
    """The numbers that were read along, one for each local member."""


def measure(
    population: Population, *, distances: bool = True, health: bool = True, watched: Tensor | None = None
) -> Measured:
    """Measure refreshed members: distances to the mean, and which are finite, if asked for. All processes must call it.

    One non-finite weight makes the distances of all members non-finite. So if these are finite, only buffers, which do
    not count for the distances, remain to be checked. `watched` is a number for each local member, which is read with
    the others.
    """
    found = [population._distances()] if distances else []
    sums = population._row_sums(only_buffers=distances) if health else []
    numbers = _read(found + sums + ([] if watched is None else [watched.double()]))
    measured = tuple(numbers[0]) if distances else None
    if health and measured is not None and not all(map(math.isfinite, measured)):
        are_finite = (False,) * len(population)
    else:
        are_finite = _all_finite(numbers[len(found) : len(found) + len(sums)], len(population))
    return Measured(measured, are_finite, () if watched is None else tuple(numbers[-1]))


def measure_chosen(chosen: Sequence[Tensor], *, watched: Tensor | None = None) -> Measured:
    """Find out which local members are finite in some columns; `watched` is as for `measure`."""
    numbers = _read([*map(row_sums, chosen), *([] if watched is None else [watched.double()])])
    are_finite = _all_finite(numbers[: len(chosen)], len(chosen[0]))
    return Measured(None, are_finite, () if watched is None else tuple(numbers[-1]))


def _read(parts: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of several tensors, by one copy from the device."""
    if len(parts) < 2 or len({part.device for part in parts}) > 1:  # distances of several processes are on the CPU
        return [part.tolist() for part in parts]
    numbers = iter(torch.cat(list(parts)).tolist())
    return [[next(numbers) for _ in range(len(part))] for part in parts]


def _all_finite(rows: Sequence[Sequence[float]], num_rows: int) -> tuple[bool, ...]:
    are_finite = [map(math.isfinite, row) for row in rows]
    return tuple(map(all, zip(*are_finite, strict=True))) if rows else (True,) * num_rows
