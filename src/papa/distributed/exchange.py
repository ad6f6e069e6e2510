"""The exact exchange: columns of all members' rows travel to one process, which works on them, and back.

The matrix is cut into the blocks of columns that a single process would use. In each round every process receives a few
whole blocks, with the rows of all members in member order, so what it computes has the bits of a single process.
Rounds are pipelined: while a process works on one round, the next arrives and the one before is on its way back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from papa.core.group import Work, balanced_ranges
from papa.core.product import block_width
from papa.distributed.collectives import connection_errors, rank_in

MESSAGE_BYTES = 2 << 20
"""The approximate size of a message: large enough for full bandwidth, small enough for a pipeline."""

CHUNK_BYTES = 16 << 20
"""The size of an all-reduce, each of which has a fixed cost."""
CHUNKS_UNDER_WAY = 2

T = TypeVar("T")
Wait: TypeAlias = Callable[[], Tensor]
"""Waits for a collective and returns its output."""


@dataclass(frozen=True)
class Round:
    """The columns that each rank works on at the same time."""

    columns: tuple[range, ...]
    """One range of whole blocks for each rank."""
    block_width: int

    @property
    def span(self) -> slice:
        """The columns of all ranks together."""
        return slice(self.columns[0].start, self.columns[-1].stop)


class ColumnExchange:
    """Moves columns between the processes of a group; `counts` are the numbers of members of each, in rank order."""

    def __init__(self, group: dist.ProcessGroup | None, counts: Sequence[int]) -> None:
        self.group = group
        self.counts = list(counts)
        self.members = [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        """The members of each rank."""
        self.size = sum(counts)
        self.rank = rank_in(group)
        self.num_ranks = len(self.counts)
        self.bytes_sent = 0
        self._buffers: dict[tuple[str, int, torch.device], Tensor] = {}
        self._last_used: dict[str, int] = {}

    def buffer(self, purpose: str, numel: int, like: Tensor, *, depth: int) -> Tensor:
        """Uninitialised memory with the dtype and device of `like`, reused after `depth` calls for the same purpose.

        New memory would have to be paged in at every exchange, which takes as long as the exchange itself.
        """
        index = self._last_used[purpose] = (self._last_used.get(purpose, -1) + 1) % depth
        key, num_bytes = (purpose, index, like.device), numel * like.element_size()
        if key not in self._buffers or len(self._buffers[key]) < num_bytes:
            self._buffers[key] = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._buffers[key][:num_bytes].view(like.dtype)

    def map_columns(
        self,
        parts: Sequence[Tensor],
        work: Work[T],
        *,
        changes: Collection[int],
        singles: Collection[int] = (),
        copies: Collection[int] = (),
        members: Sequence[int] | None = None,
    ) -> list[T]:
        """`Group.map_columns`: rounds are pipelined, so that the next one arrives while this one is worked on."""
        none = [0] * self.num_ranks
        counts = [
            [1, *none[1:]] if number in singles else none if number in copies else self.counts
            for number in range(len(parts))
        ]
        rounds = self._rounds(parts[0], sum(map(sum, counts)))
        mine = self.members[self.rank]
        sent = [list(rows) if number not in copies else [] for number, rows in enumerate(parts)]
        received = list(counts)
        if members is not None:
            sent[0] = [parts[0][member - mine.start] for member in members if member in mine]
            received[0] = [sum(member in theirs for member in members) for theirs in self.members]
        arriving: deque[list[Wait]] = deque()
        finishes: list[Callable[[], object]] = []
        found = []
        for number, this in enumerate(rounds):
            for later in rounds[number + len(arriving) : number + 2]:
                starts = zip(parts, sent, received, strict=True)
                arriving.append(
                    [
                        self._start_rows_to_columns(rows, of, later, like=like, name=f" {n}")
                        for n, (like, rows, of) in enumerate(starts)
                    ]
                )
            columns = [wait() for wait in arriving.popleft()]
            width = len(this.columns[self.rank])
            for copy in copies:
                columns[copy] = columns[copy].new_empty(len(parts[copy]), width)
            if members is not None and len(members) < self.size:
                only, columns[0] = columns[0], columns[0].new_empty(self.size, width)
                columns[0][members] = only
            if width:
                found.append(work(columns, this.columns[self.rank].start, this.block_width))
            previous, finishes = finishes, []
            for changed in changes:
                if changed in copies:
                    target = parts[changed][0, this.span]
                    sizes = [len(one) for one in this.columns]
                    source = columns[changed][0].repeat(self.num_ranks)
                    finishes.append(self._start_all_to_all(target, source, sizes, [width] * self.num_ranks))
                else:
                    finishes.append(
                        self._start_columns_to_rows(
                            columns[changed], parts[changed], this, counts[changed], f" {changed}"
                        )
                    )
            for finish in previous:
                finish()
        for finish in finishes:
            finish()
        return found

    def _rounds(self, rows: Tensor, num_rows: int) -> list[Round]:
        """All columns of the whole matrix, which has `num_rows`; `rows` are some of them."""
        num_columns = rows.shape[1]
        width = block_width(rows, num_rows, num_columns)
        num_blocks = -(-num_columns // width)
        block_bytes = width * rows.element_size() * max(1, num_rows // self.num_ranks)
        per_round = self.num_ranks * max(1, MESSAGE_BYTES // block_bytes)
        rounds = []
        for first in range(0, num_blocks, per_round):
            blocks = balanced_ranges(min(per_round, num_blocks - first), self.num_ranks)
            ends = [min((first + end) * width, num_columns) for end in (0, *(part.stop for part in blocks))]
            columns = tuple(range(start, stop) for start, stop in pairwise(ends))
            rounds.append(Round(columns, width))
        return rounds

    def _start_rows_to_columns(
        self, rows: Sequence[Tensor], counts: Sequence[int], this: Round, *, like: Tensor, name: str
    ) -> Wait:
        """Send every rank its columns of local rows, and receive this rank's columns of `counts` rows of each rank."""
        width = len(this.columns[self.rank])
        parts = [row[columns.start : columns.stop] for columns in this.columns for row in rows]
        send = self.buffer(f"send{name}", sum(map(len, parts)), like, depth=2)
        if parts:
            torch.cat(parts, out=send)
        received = self.buffer(f"columns{name}", sum(counts) * width, like, depth=3).view(sum(counts), width)
        sizes = [count * width for count in counts]
        return self._start_all_to_all(received, send, sizes, [len(rows) * len(columns) for columns in this.columns])

    def _start_columns_to_rows(
        self, columns: Tensor, rows: Tensor, this: Round, counts: Sequence[int], name: str
    ) -> Callable[[], None]:
        """Send the columns of this rank back to the ranks of their rows; the returned function fills the local rows."""
        num_rows, width = len(rows), len(this.columns[self.rank])
        sizes = [num_rows * len(part) for part in this.columns]
        received = self.buffer(f"back{name}", sum(sizes), rows, depth=2)
        wait = self._start_all_to_all(received, columns, sizes, [count * width for count in counts])

        def finish() -> None:
            for target, part in zip(this.columns, torch.split(wait(), sizes), strict=True):
                rows[:, target.start : target.stop].copy_(part.view(num_rows, len(target)))

        return finish

    def _start_all_to_all(self, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]) -> Wait:
        """Send a part of `source` to each rank and fill `output` with theirs; sizes are numbers of elements."""
        itemsize = output.element_size()
        with connection_errors("exchanging weights"):
            # As bytes: not every backend supports every dtype.
            work = dist.all_to_all_single(
                output.view(-1).view(torch.uint8),
                source.contiguous().view(-1).view(torch.uint8),
                [size * itemsize for size in received],
                [size * itemsize for size in sent],
                group=self.group,
                async_op=True,
            )
        self.bytes_sent += (sum(sent) - sent[self.rank]) * itemsize

        def wait() -> Tensor:
            assert work is not None
            assert source is not None  # keeps it alive until it was sent
            with connection_errors("exchanging weights"):
                work.wait()
            return output

        return wait

    def push_by_sums_(self, rows: Tensor, keep: float) -> None:
        """A push with the mean of all members by an all-reduce, in float32 or better, several chunks at a time.

        It needs fewer bytes, but the last bits depend on the number of processes.
        """
        dtype = rows.dtype if rows.element_size() >= 4 else torch.float32
        width = CHUNK_BYTES // dtype.itemsize
        under_way: deque[tuple[slice, Tensor, Tensor, dist.Work]] = deque()

        def finish() -> None:
            columns, wide, mean, work = under_way.popleft()
            with connection_errors("adding up weights"):
                work.wait()
            wide.lerp_(mean, 1.0 - keep)
            if wide.dtype != rows.dtype:
                rows[:, columns].copy_(wide)

        for start in range(0, rows.shape[1], width):
            columns = slice(start, min(start + width, rows.shape[1]))
            wide = rows[:, columns].to(dtype)
            total = self.buffer("total", wide.shape[1], wide, depth=CHUNKS_UNDER_WAY + 1)
            torch.mul(wide[0], 1.0 / self.size, out=total)
            for row in wide[1:]:
                total.add_(row, alpha=1.0 / self.size)
            with connection_errors("adding up weights"):
                work = dist.all_reduce(total, group=self.group, async_op=True)
            assert work is not None
            self.bytes_sent += 2 * (self.num_ranks - 1) * total.nbytes // self.num_ranks
            under_way.append((columns, wide, total, work))
            if len(under_way) > CHUNKS_UNDER_WAY:
                finish()
        while under_way:
            finish()
