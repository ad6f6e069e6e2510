"""The mean of all rows by a sum over processes: fewer bytes than an exchange of columns, but its last bits depend on
how members are spread.

Rows are summed in each process first, then over processes, a chunk of columns at a time, several chunks under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from papa.group.exchange import Wires
from papa.group.plainly import plainly
from papa.group.shared_memory import balanced_share

CHUNKS_UNDER_WAY = 2

Finish: TypeAlias = Callable[[], Tensor]


class Mean(Protocol):
    """Starts the mean over all members of one chunk of columns; what is returned waits for it."""

    chunk_bytes: ClassVar[int]
    """How much of a row, in float32, is one chunk."""

    def __call__(self, rows: Tensor, columns: slice) -> Finish:
        """`rows` are those held here, in float32 or better, already cut to the columns."""
        ...


class AllReduced:
    """The mean by an all-reduce in float32 (float64 where the numbers are)."""

    chunk_bytes: ClassVar[int] = 16 << 20  # starting a sum has its price

    def __init__(self, wires: Wires) -> None:
        self.wires = wires

    def __call__(self, rows: Tensor, columns: slice) -> Finish:
        """Sum the rows here, then over ranks."""
        total = self.wires.spare("total", rows.shape[1], rows, depth=CHUNKS_UNDER_WAY + 2)
        torch.mul(rows[0], 1.0 / self.wires.size, out=total)
        for row in rows[1:]:
            total.add_(row, alpha=1.0 / self.wires.size)
        with plainly("adding up members' numbers"):
            work = dist.all_reduce(total, group=self.wires.group, async_op=True)
        others = self.wires.num_ranks - 1
        self.wires.bytes_sent += 2 * others * total.numel() * total.element_size() // self.wires.num_ranks

        def finish() -> Tensor:
            assert work is not None
            with plainly("adding up members' numbers"):
                work.wait()
            return total

        return finish


class Differences:
    """The mean by sums of differences to the last mean, which travel as bfloat16 and are added in float32.

    Every rank keeps the last mean; rounding is relative to how far members moved, not to how large their weights are,
    and does not add up: the next difference is taken to the mean that everyone has. Each rank adds up a part of the
    columns in rank order and tells everyone, so that all have the same bits.

    Args:
        wires: to the other ranks.
        last: the mean everyone has, one number per column; changed in place.
        is_new: there is no mean yet, and `last` is zero: the differences to it travel in full.
    """

    chunk_bytes: ClassVar[int] = 4 << 20  # while some travel, others are rounded and added up

    def __init__(self, wires: Wires, last: Tensor, *, is_new: bool) -> None:
        self.wires = wires
        self.last = last
        self._wire_dtype = last.dtype if is_new else torch.bfloat16
        self._half: _Once | None = None

    def __call__(self, rows: Tensor, columns: slice) -> Finish:
        """Scatter the differences; meanwhile add up those of the chunk before, and spread their sums."""
        last, wires = self.last[columns], self.wires
        difference = summed(rows - last).div_(wires.size).to(self._wire_dtype)
        shares = [balanced_share(len(difference), rank, wires.num_ranks) for rank in range(wires.num_ranks)]
        mine, sizes = len(shares[wires.rank]), [len(share) for share in shares]
        stage = torch.empty(wires.num_ranks, mine, dtype=self._wire_dtype, device=rows.device)
        scattered = wires.start(stage, difference, [mine] * wires.num_ranks, sizes)

        def spread() -> Finish:
            total = summed(scattered().to(last.dtype))
            return wires.start_spread(torch.empty_like(difference), total.to(self._wire_dtype), sizes)

        half = _Once(spread)
        if self._half is not None:
            self._half()
        self._half = half
        return lambda: last.add_(half()())


class _Once:
    """A function that is called the first time it is asked for, and remembers what it returned."""

    def __init__(self, function: Callable[[], Finish]) -> None:
        self._function = function
        self._value: Finish | None = None

    def __call__(self) -> Finish:
        if self._value is None:
            self._value = self._function()
        return self._value


def summed(rows: Tensor) -> Tensor:
    """The sum of rows, added in their order, as a new row."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def mean_chunks(rows: Tensor, mean: Mean) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunk by chunk: the columns, the rows held here in float32 or better, and the mean of all members' rows.

    Where the rows have that precision, the chunk is their own memory.
    """
    wide_dtype = rows.dtype if rows.element_size() >= 4 else torch.float32
    width = mean.chunk_bytes // wide_dtype.itemsize
    under_way: deque[tuple[slice, Tensor, Finish]] = deque()
    for start in range(0, rows.shape[1], width):
        columns = slice(start, min(start + width, rows.shape[1]))
        wide = rows[:, columns].to(wide_dtype)
        under_way.append((columns, wide, mean(wide, columns)))
        if len(under_way) > CHUNKS_UNDER_WAY:
            yield _finished(under_way)
    while under_way:
        yield _finished(under_way)


def _finished(under_way: deque[tuple[slice, Tensor, Finish]]) -> tuple[slice, Tensor, Tensor]:
    columns, wide, finish = under_way.popleft()
    return columns, wide, finish()
