"""Column masks: the part of the columns that a sparse rule acts on.

Masks are drawn from a stream of the rule, so all processes draw the same one, and only the chosen columns are read,
sent and written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from papa.layout import Layout, Slot


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
    process has a point in it, and the points are sums of exponential gaps.

    Args:
        layout: the tensors and their columns.
        shares: the probability of each tensor's columns, in the order of `layout.slots`.
        generator: of the rule.
    """
    rates = torch.tensor([-math.log1p(-min(share, 1.0 - 2.0**-53)) for share in shares], dtype=torch.float64)
    sizes = torch.tensor([slot.numel for slot in layout.slots], dtype=torch.float64)
    ends = torch.cumsum(rates * sizes, dim=0)
    points = _poisson_points(float(ends[-1]), generator)
    slots = torch.bucketize(points, ends, right=True)
    starts = ends - rates * sizes
    places = ((points - starts[slots]) / rates[slots]).floor_().to(torch.int64)
    places = places.clamp_(min=0).minimum(sizes[slots].to(torch.int64) - 1)  # rounding at the ends of tensors
    columns = places + torch.tensor([slot.offset for slot in layout.slots])[slots]
    found = {}
    for dtype in layout.num_columns:
        if len(layout.num_columns) > 1:
            has_dtype = torch.tensor([slot.dtype == dtype for slot in layout.slots])
            chosen = columns[has_dtype[slots]]
        else:
            chosen = columns
        found[dtype] = torch.unique_consecutive(chosen).to(layout.device)
    return found


def _poisson_points(length: float, generator: torch.Generator) -> Tensor:
    """The points of a Poisson process of rate 1 on `[0, length)`."""
    count = int(length + 10.0 * math.sqrt(length) + 10.0)  # enough but for a chance of 1e-20
    gaps = torch.empty(count, dtype=torch.float64).exponential_(generator=generator)
    points = torch.cumsum(gaps, dim=0)
    return points[: int(torch.searchsorted(points, length))]


def draw_permutations(size: int, num_columns: int, generator: torch.Generator) -> Tensor:
    """A random permutation of the members for each column, `(size, num_columns)`; all are equally likely."""
    order = torch.arange(size).unsqueeze(1).repeat(1, num_columns)
    for last in range(size - 1, 0, -1):
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
    """Split the columns into ranges of whole tensors of about the same size.

    Args:
        layout: the tensors and their columns.
        count: the number of fragments.
    """
    found: list[dict[torch.dtype, slice]] = [{} for _ in range(count)]
    total, done = sum(slot.numel for slot in layout.slots), 0
    for slot in layout.slots:
        middle, done = done + slot.numel / 2, done + slot.numel
        fragment = found[min(count - 1, int(middle / max(1, total) * count))]
        start = fragment[slot.dtype].start if slot.dtype in fragment else slot.offset
        fragment[slot.dtype] = slice(start, slot.offset + slot.numel)
    return found
