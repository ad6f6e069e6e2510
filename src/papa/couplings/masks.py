"""Column masks: the part of the columns that a sparse rule acts on.

Masks are drawn from a stream of the rule, so all processes draw the same one, and only the chosen columns are read,
sent and written.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from papa.core.layout import ALIGNMENT_BYTES, Layout, Slot
from papa.core.product import Lines
from papa.errors import MixingError

MAX_SIZE_OF_TABLE = 6
"""Up to this number of members, permutations are looked up in a table of all of them, which is faster."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The columns that a rule acts on."""

    columns: Mapping[torch.dtype, Lines | slice]
    """For each dtype; one that is missing stays unchanged."""
    sources: Mapping[torch.dtype, Tensor] | None = None
    """For a rule that permutes: from which member each member takes each line, `(size, lines)` in int32."""

    def check(self, layout: Layout, size: int) -> None:
        """Raise a `MixingError` if it does not fit the networks; that sources are permutations is not checked."""
        for dtype, columns in self.columns.items():
            if dtype not in layout.num_columns:
                raise MixingError(f"the mask has columns of {dtype}, which the networks do not have")
            if isinstance(columns, Lines):
                numbers, most = columns.numbers, ALIGNMENT_BYTES // dtype.itemsize
                if numbers.dtype != torch.int64 or numbers.ndim != 1:
                    found = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
                    raise MixingError(f"the numbers of lines are {found}, expected a vector in int64")
                if columns.width < 1 or most % columns.width:
                    raise MixingError(
                        f"the width of lines is {columns.width}, expected a divisor of {most} for {dtype}"
                    )
            elif not isinstance(columns, slice) or columns.step not in (None, 1):
                raise MixingError(
                    f"the columns of a mask are {columns!r:.80}, expected a slice without a step or "
                    "papa.core.product.Lines(indices)"
                )
            if self.sources is None:
                continue
            shape = tuple(self.sources[dtype].shape) if dtype in self.sources else None
            if not isinstance(columns, Lines) or shape != (size, len(columns.numbers)):
                raise MixingError(
                    f"the sources of a mask have the shape {shape} for {dtype}, expected one row for each member and "
                    "one column for each of its lines"
                )


def draw_columns(
    layout: Layout, shares: Sequence[float], generator: torch.Generator, *, by_lines: bool
) -> dict[torch.dtype, Lines]:
    """Random columns, each with the probability of its tensor, in time for the chosen ones only.

    Whole lines of 64 bytes are chosen independently of each other, or single columns. No line has columns of two
    tensors; the last one of a tensor may have columns that belong to none, and are zero. `shares` are in the order of
    `layout.slots`.
    """
    widths = {dtype: ALIGNMENT_BYTES // dtype.itemsize if by_lines else 1 for dtype in layout.num_columns}
    chosen = set(shares) - {0.0}
    if len(chosen) == 1:
        found = _with_one_share(layout, shares, chosen.pop(), generator, widths)
    else:
        found = _with_many_shares(layout, shares, generator, widths)
    return {dtype: Lines(numbers.to(layout.device), widths[dtype]) for dtype, numbers in found.items()}


def _with_one_share(
    layout: Layout,
    shares: Sequence[float],
    share: float,
    generator: torch.Generator,
    widths: Mapping[torch.dtype, int],
) -> dict[torch.dtype, Tensor]:
    """The numbers of lines of the tensors that have a share, all with the same one.

    From one chosen line to the next it is `1 + floor(x / rate)` lines, where `x` is exponential. These are whole
    numbers, so none is chosen twice and nothing is rounded at the ends of tensors.
    """
    found = {}
    for dtype, width in widths.items():
        slots = [slot for slot, own in zip(layout.slots, shares, strict=True) if own and slot.dtype == dtype]
        spans = _joined(slots, width)
        if not spans:
            found[dtype] = torch.zeros(0, dtype=torch.int64, device="cpu")
            continue
        sizes = [stop - start for start, stop in spans]
        ends = list(itertools.accumulate(sizes))
        numbers = _places(ends[-1], _rate(share), generator).to(torch.int64)
        shifts = torch.tensor([stop - end - 1 for (_, stop), end in zip(spans, ends, strict=True)], device="cpu")
        if len(spans) > 1:
            last = torch.searchsorted(numbers, torch.tensor(ends, device="cpu"), right=True)
            shifts = torch.repeat_interleave(shifts, torch.diff(last, prepend=last.new_zeros(1)))
        found[dtype] = numbers.add_(shifts)
    return found


def _joined(slots: Sequence[Slot], width: int) -> list[tuple[int, int]]:
    """The first and the last line plus one of slots, those without a gap between them together."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        start, stop = slot.offset // width, -(-(slot.offset + slot.numel) // width)
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def _places(length: int, rate: float, generator: torch.Generator) -> Tensor:
    """Each of `1, ..., length` with probability `1 - exp(-rate)`, sorted."""
    is_small = length < 2**30 and rate > 2.0**-19  # then gaps are exact in float32, and their sums in int32
    numbers, whole = (torch.float32, torch.int32) if is_small else (torch.float64, torch.int64)
    count = min(length, _enough(-math.expm1(-rate) * length))
    uniform = torch.rand(count, dtype=numbers, generator=generator, device="cpu")
    gaps = uniform.neg_().log1p_().mul_(-1.0 / rate).add_(1.0).to(whole)
    places = torch.cumsum(gaps, dim=0, dtype=whole)
    return places[: int(torch.searchsorted(places, length, right=True))]


def _rate(share: float) -> float:
    """The rate of a Poisson process that has a point in a column with the probability `share`."""
    return -math.log1p(-min(share, 1.0 - 2.0**-53))


def _enough(mean: float) -> int:
    """More than a Poisson number with this mean, but for a chance of 1e-20."""
    return int(mean + 10.0 * math.sqrt(mean) + 10.0)


def _with_many_shares(
    layout: Layout, shares: Sequence[float], generator: torch.Generator, widths: Mapping[torch.dtype, int]
) -> dict[torch.dtype, Tensor]:
    """A Poisson process runs through all lines, at the rate `-log(1 - share)` within a tensor.

    A line is chosen if the process has a point in it, and the points are sums of exponential gaps.
    """
    slots = layout.slots
    rates = torch.tensor([_rate(share) for share in shares], dtype=torch.float64, device="cpu")
    first, sizes = (layout.spans / torch.tensor([widths[slot.dtype] for slot in slots], device="cpu")).ceil()
    ends = torch.cumsum(rates * sizes, dim=0)
    points = _poisson_points(float(ends[-1]), generator)
    counts = torch.diff(torch.searchsorted(points, ends), prepend=torch.zeros(1, dtype=torch.int64, device="cpu"))
    slot_of_points = torch.repeat_interleave(counts)

    def of_points(values: Tensor) -> Tensor:
        return values.index_select(0, slot_of_points)

    # line = first + (point - start of the tensor) / rate
    lines_per_point = torch.where(rates > 0, 1.0 / rates, 0.0)
    places = points.mul_(of_points(lines_per_point)).add_(of_points(first - (ends - rates * sizes) * lines_per_point))
    places.clamp_(min=of_points(first), max=of_points(first + sizes - 1.0))  # rounding at the ends of tensors
    numbers = places.to(torch.int64)
    found = {}
    for dtype in layout.num_columns:
        chosen = numbers
        if len(layout.num_columns) > 1:
            chosen = numbers[of_points(torch.tensor([slot.dtype == dtype for slot in slots], device="cpu"))]
        found[dtype] = torch.unique_consecutive(chosen)
    return found


def _poisson_points(length: float, generator: torch.Generator) -> Tensor:
    """The points of a Poisson process of rate 1 on `[0, length)`."""
    uniform = torch.rand(_enough(length), dtype=torch.float32, generator=generator, device="cpu")
    gaps = uniform.neg_().log1p_().neg_()  # exponential
    points = torch.cumsum(gaps, dim=0, dtype=torch.float64)
    return points[: int(torch.searchsorted(points, length))]


def draw_permutations(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Random permutations of the members, `(size, count)` in int32; all are equally likely."""
    if size <= MAX_SIZE_OF_TABLE:
        table = _all_permutations(size)
        chosen = torch.randint(table.shape[1], (count,), dtype=torch.int32, generator=generator, device="cpu")
        found = torch.empty(size, count, dtype=torch.int32, device="cpu")
        for row, target in zip(table, found, strict=True):  # faster than the table at once
            torch.index_select(row, 0, chosen, out=target)
        return found
    order = torch.arange(size, device="cpu").unsqueeze(1).repeat(1, count)
    for last in range(size - 1, 0, -1):  # Fisher-Yates, all at once
        other = torch.randint(last + 1, (1, count), generator=generator, device="cpu")
        swapped = order.gather(0, other)
        order.scatter_(0, other, order[last : last + 1].clone())
        order[last : last + 1] = swapped
    return order.to(torch.int32)


@functools.cache
def _all_permutations(size: int) -> Tensor:
    """One in each column."""
    return torch.tensor(list(itertools.permutations(range(size))), dtype=torch.int32, device="cpu").T.contiguous()


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
