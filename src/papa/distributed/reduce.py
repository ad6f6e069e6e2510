"""The exchange by sums: the mean row of all members from fewer bytes, but with last bits that depend on the processes.

Each process adds up its own rows; the sums are then added over processes, a chunk of columns at a time, with several
chunks under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

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


def mean_by_chunk(rows: Tensor, reducer: AllReduceMean) -> Iterator[tuple[slice, Tensor, Tensor]]:
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
