"""The exchanges by sums: the mean row of all members from fewer bytes, but with last bits that depend on the processes.

Each process adds up its own rows; the sums are then added over processes, a chunk of columns at a time, with several
chunks under way.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from papa.core.group import balanced_ranges
from papa.distributed.collectives import connection_errors
from papa.distributed.exchange import ColumnExchange, Wait

CHUNKS_UNDER_WAY = 2


class AllReduceMean:
    """The mean by an all-reduce in the dtype of the rows (`exchange="fast"`)."""

    chunk_bytes = 16 << 20  # every all-reduce has a fixed cost

    def __init__(self, exchange: ColumnExchange) -> None:
        self.exchange = exchange

    def start(self, rows: Tensor, columns: slice) -> Wait:
        """Start the mean of some columns, where `rows` has those columns of the local rows."""
        exchange = self.exchange
        total = exchange.buffer("total", rows.shape[1], rows, depth=CHUNKS_UNDER_WAY + 2)
        torch.mul(rows[0], 1.0 / exchange.size, out=total)
        for row in rows[1:]:
            total.add_(row, alpha=1.0 / exchange.size)
        with connection_errors("adding up weights"):
            work = dist.all_reduce(total, group=exchange.group, async_op=True)
        exchange.bytes_sent += 2 * (exchange.num_ranks - 1) * total.nbytes // exchange.num_ranks

        def wait() -> Tensor:
            assert work is not None
            with connection_errors("adding up weights"):
                work.wait()
            return total

        return wait


class DifferenceMean:
    """The mean as the last mean plus a sum of differences, which travel as bfloat16 (`exchange="bfloat16"`).

    Every rank keeps the last mean. The rounding error is relative to how far members moved, not to their weights, and
    does not accumulate: the next difference is taken to the mean that all ranks have. Differences are added in float32;
    each rank adds up its part of the columns in rank order and sends the sum to all, so all ranks have the same bits.

    `last` is changed in place. With `is_new` it is zero because there was no mean yet; the differences then travel in
    full precision.
    """

    chunk_bytes = 4 << 20  # small, so that rounding and adding overlap with communication

    def __init__(self, exchange: ColumnExchange, last: Tensor, *, is_new: bool) -> None:
        self.exchange = exchange
        self.last = last
        self._sent_dtype = last.dtype if is_new else torch.bfloat16
        self._share_previous: Callable[[], Wait] | None = None

    def start(self, rows: Tensor, columns: slice) -> Wait:
        last, exchange, num_ranks = self.last[columns], self.exchange, self.exchange.num_ranks
        difference = add_rows(rows - last).div_(exchange.size).to(self._sent_dtype)
        sizes = [len(part) for part in balanced_ranges(len(difference), num_ranks)]
        mine = sizes[exchange.rank]
        parts = torch.empty(num_ranks, mine, dtype=self._sent_dtype, device=rows.device)
        scattered = exchange.start_all_to_all(parts, difference, [mine] * num_ranks, sizes)

        @functools.cache
        def share_sum() -> Wait:
            total = add_rows(scattered().to(last.dtype))
            return exchange.start_all_gather(torch.empty_like(difference), total.to(self._sent_dtype), sizes)

        if self._share_previous is not None:
            self._share_previous()  # while the differences of this chunk travel
        self._share_previous = share_sum
        return lambda: last.add_(share_sum()())


MeanReducer: TypeAlias = AllReduceMean | DifferenceMean


def add_rows(rows: Tensor) -> Tensor:
    """The sum of rows, added in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def mean_by_chunk(rows: Tensor, reducer: MeanReducer) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunk by chunk: the columns, the local rows in float32 or float64, and the mean row of all members.

    The local rows are a view where they have that precision, else a copy.
    """
    wide_dtype = rows.dtype if rows.element_size() >= 4 else torch.float32
    width = reducer.chunk_bytes // wide_dtype.itemsize
    under_way: deque[tuple[slice, Tensor, Wait]] = deque()
    for start in range(0, rows.shape[1], width):
        columns = slice(start, min(start + width, rows.shape[1]))
        wide = rows[:, columns].to(wide_dtype)
        under_way.append((columns, wide, reducer.start(wide, columns)))
        is_last = columns.stop == rows.shape[1]
        while len(under_way) > (0 if is_last else CHUNKS_UNDER_WAY):
            columns, wide, wait = under_way.popleft()
            yield columns, wide, wait()
