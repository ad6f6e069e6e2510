"""The exact exchange: columns of all members' rows travel to one process, which works on them, and back.

The matrix is cut into the blocks of columns that a single process would use. In each round every process receives a few
whole blocks, with the rows of all members in member order, so what it computes has the bits of a single process.
Rounds are pipelined: while a process works on one round, the next arrives and the one before is on its way back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from papa.core.group import balanced_ranges
from papa.core.product import BlockUpdate, block_width, update_blocks_
from papa.distributed.collectives import connection_errors, rank_in

MESSAGE_BYTES = 2 << 20
"""The approximate size of a message: large enough for full bandwidth, small enough for a pipeline."""

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

    def blocks(self, columns: Tensor) -> list[Tensor]:
        """The blocks of one rank's columns; none where the rank has no columns."""
        return list(torch.split(columns, self.block_width, dim=1)) if columns.shape[1] else []


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

    def local_columns(self, rows: Tensor, members: Sequence[int] | None = None) -> Iterator[tuple[Round, Tensor]]:
        """Round by round, the columns that this rank works on, of the rows of all members or of some."""
        mine, chosen = self.members[self.rank], range(self.size) if members is None else members
        vectors = [rows[member - mine.start] for member in chosen if member in mine]
        counts = [sum(member in theirs for member in chosen) for theirs in self.members]
        rounds = self._rounds(rows)
        waits: list[Wait] = []
        for number, this in enumerate(rounds):
            for later in rounds[number + len(waits) : number + 2]:
                waits.append(self._start_rows_to_columns(vectors, counts, later, like=rows))
            yield this, waits.pop(0)()

    def update_(self, parts: Sequence[Tensor], update: BlockUpdate, singles: Collection[int] = ()) -> None:
        """Change all columns of several matrices: columns of all ranks' rows travel to one rank, and back.

        The parts of `singles` have a single row, which is on the first rank.
        """
        single = [1] + [0] * (self.num_ranks - 1)
        counts = [single if number in singles else self.counts for number in range(len(parts))]
        for this in self._rounds(parts[0], sum(map(sum, counts))):
            waits = [
                self._start_rows_to_columns(list(rows), of_ranks, this, like=rows, name=f" {number}")
                for number, (rows, of_ranks) in enumerate(zip(parts, counts, strict=True))
            ]
            columns = [wait() for wait in waits]
            mine = this.columns[self.rank]
            if len(mine):
                update_blocks_(columns, update, width=this.block_width, start=mine.start)
            finishes = [
                self.start_columns_to_rows(part, rows, this, counts=of_ranks, name=f" {number}")
                for number, (part, rows, of_ranks) in enumerate(zip(columns, parts, counts, strict=True))
            ]
            for finish in finishes:
                finish()

    def _rounds(self, rows: Tensor, num_rows: int | None = None) -> list[Round]:
        """All columns of the whole matrix, of which `rows` are the local rows; with extra rows it has `num_rows`."""
        num_rows = num_rows or self.size
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
        self, rows: Sequence[Tensor], counts: Sequence[int], this: Round, *, like: Tensor, name: str = ""
    ) -> Wait:
        """Send every rank its columns of local rows, and receive this rank's columns of `counts` rows of each rank."""
        width = len(this.columns[self.rank])
        parts = [row[columns.start : columns.stop] for columns in this.columns for row in rows]
        send = self.buffer(f"send{name}", sum(map(len, parts)), like, depth=2)
        if parts:
            torch.cat(parts, out=send)
        received = self.buffer(f"columns{name}", sum(counts) * width, like, depth=3).view(sum(counts), width)
        sizes = [count * width for count in counts]
        return self.start_all_to_all(received, send, sizes, [len(rows) * len(columns) for columns in this.columns])

    def start_columns_to_rows(
        self, columns: Tensor, rows: Tensor, this: Round, *, counts: Sequence[int] | None = None, name: str = ""
    ) -> Callable[[], None]:
        """Send the columns of this rank back to the ranks of their rows; the returned function fills the local rows."""
        num_rows, width = len(rows), len(this.columns[self.rank])
        sizes = [num_rows * len(part) for part in this.columns]
        received = self.buffer(f"back{name}", sum(sizes), rows, depth=2)
        wait = self.start_all_to_all(received, columns, sizes, [count * width for count in counts or self.counts])

        def finish() -> None:
            for target, part in zip(this.columns, torch.split(wait(), sizes), strict=True):
                rows[:, target.start : target.stop].copy_(part.view(num_rows, len(target)))

        return finish

    def start_all_gather(self, target: Tensor, part: Tensor, sizes: Sequence[int]) -> Wait:
        """Send `part` to all ranks and fill `target` with the parts of all, whose sizes may differ."""
        return self.start_all_to_all(target, part.repeat(self.num_ranks), sizes, [len(part)] * self.num_ranks)

    def start_all_to_all(self, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]) -> Wait:
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
