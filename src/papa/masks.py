"""Column masks: the part of the columns that a sparse rule acts on.

Masks are drawn from a stream of the rule, so all processes draw the same one, and only the chosen columns are read,
sent and written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from papa.layout import Layout, Slot

MAX_SIZE_OF_TABLE = 6
"""Up to this number of members, permutations are looked up in a table of all of them, which is faster."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The columns that a rule acts on."""

    columns: Mapping[torch.dtype, Tensor | slice]
    """Sorted indices or a slice, for each dtype; a dtype that is missing stays unchanged."""
    sources: Mapping[torch.dtype, Tensor] | None = None
    """For a rule that permutes: from which member each member takes each column, `(size, columns)`."""


def draw_columns(layout: Layout, shares: Sequence[float], generator: torch.Generator) -> dict[torch.dtype, Tensor]:
    """Random columns, each of them chosen independently with the share of its tensor; in time for the chosen ones only.

    A Poisson process runs through all columns, at the rate `-log(1 - share)` within a tensor. A column is chosen if the
    process has a point in it, and the points are sums of exponential gaps. `shares` are in the order of `layout.slots`.
    """
    slots = layout.slots
    rates = torch.tensor([-math.log1p(-min(share, 1.0 - 2.0**-53)) for share in shares], dtype=torch.float64)
    first, sizes = layout.spans
    ends = torch.cumsum(rates * sizes, dim=0)
    points = _poisson_points(float(ends[-1]), generator)
    counts = torch.diff(torch.searchsorted(points, ends), prepend=torch.zeros(1, dtype=torch.int64))
    slot_of_points = torch.repeat_interleave(counts)

    def of_points(values: Tensor) -> Tensor:
        return values.index_select(0, slot_of_points)

    # column = first + (point - start of the tensor) / rate
    columns_per_point = torch.where(rates > 0, 1.0 / rates, 0.0)
    places = points.mul_(of_points(columns_per_point)).add_(
        of_points(first - (ends - rates * sizes) * columns_per_point)
    )
    places.clamp_(min=of_points(first), max=of_points(first + sizes - 1.0))  # rounding at the ends of tensors
    columns = places.to(torch.int64)
    found = {}
    for dtype in layout.num_columns:
        chosen = columns
        if len(layout.num_columns) > 1:
            chosen = columns[of_points(torch.tensor([slot.dtype == dtype for slot in slots]))]
        found[dtype] = torch.unique_consecutive(chosen).to(layout.device)
    return found


def _poisson_points(length: float, generator: torch.Generator) -> Tensor:
    """The points of a Poisson process of rate 1 on `[0, length)`."""
    count = int(length + 10.0 * math.sqrt(length) + 10.0)  # enough but for a chance of 1e-20
    gaps = torch.rand(count, dtype=torch.float32, generator=generator).neg_().log1p_().neg_()  # exponential
    points = torch.cumsum(gaps, dim=0, dtype=torch.float64)
    return points[: int(torch.searchsorted(points, length))]


def draw_permutations(size: int, num_columns: int, generator: torch.Generator) -> Tensor:
    """A random permutation of the members for each column, `(size, num_columns)`; all are equally likely."""
    if size <= MAX_SIZE_OF_TABLE:
        table = torch.tensor(list(itertools.permutations(range(size)))).T.contiguous()
        chosen = torch.randint(table.shape[1], (num_columns,), generator=generator)
        found = torch.empty(size, num_columns, dtype=torch.int64)
        for row, target in zip(table, found, strict=True):  # faster than the table at once
            torch.index_select(row, 0, chosen, out=target)
        return found
    order = torch.arange(size).unsqueeze(1).repeat(1, num_columns)
    for last in range(size - 1, 0, -1):  # Fisher-Yates, in all columns at once
        other = torch.randint(last + 1, (1, num_columns), generator=generator)
        swapped = order.gather(0, other)
        order.scatter_(0, other, order[last : last + 1].clone())
        order[last : last + 1] = swapped
    return order


def depths(layout: Layout) -> list[float]:
    """How deep in the network each tensor is: from 0 in the first layer to 1 in the last, in the order of the model."""
    layers: dict[str, int] = {}
    for slot in layout.slots:
        if slot.is_parameter:
            layers.setdefault(_layer_of(slot), len(layers))
    last = max(1, len(layers) - 1)
    return [layers.get(_layer_of(slot), 0) / last for slot in layout.slots]


def _layer_of(slot: Slot) -> str:
    return slot.name.rpartition(".")[0]


def fragments(layout: Layout, count: int) -> list[dict[torch.dtype, slice]]:
    """Split the columns into `count` ranges of whole tensors of about the same size."""
    found: list[dict[torch.dtype, slice]] = [{} for _ in range(count)]
    total, done = sum(slot.numel for slot in layout.slots), 0
    for slot in layout.slots:
        middle, done = done + slot.numel / 2, done + slot.numel
        fragment = found[min(count - 1, int(middle / max(1, total) * count))]
        start = fragment[slot.dtype].start if slot.dtype in fragment else slot.offset
        fragment[slot.dtype] = slice(start, slot.offset + slot.numel)
    return found
