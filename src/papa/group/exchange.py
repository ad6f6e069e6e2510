"""Columns travel: every process gets a part of the columns of all rows, works on it, and hands it back.

The matrix is cut into the blocks of columns that one process would cut it into. In each round every process gets a few
of them, all rows in member order. What is computed on them has therefore the bits that one process would compute.
Rounds follow each other in a pipeline: while one is worked on, the next is on its way and the one before is going home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from papa.group.plainly import plainly
from papa.group.shared_memory import balanced_share
from papa.product import block_width

MESSAGE_BYTES = 2 << 20
"""About how much one process sends another at once: large enough for the wire, small enough for a pipeline."""

Wait: TypeAlias = Callable[[], Tensor]
"""Waits for something under way and returns it."""


@dataclass(frozen=True)
class Round:
    """What is exchanged at once: for each rank, the columns it works on, which are whole blocks in rank order."""

    columns: tuple[range, ...]
    width: int
    """The columns of a block."""

    @property
    def all(self) -> slice:
        """The columns of all ranks together."""
        return slice(self.columns[0].start, self.columns[-1].stop)


class Wires:
    """Moves bytes between the processes of a group, and counts those sent.

    Args:
        group: the processes.
        counts: how many members each of them holds, in rank order.
    """

    def __init__(self, group: dist.ProcessGroup, counts: Sequence[int]) -> None:
        self.group = group
        self.counts = list(counts)
        self.size = sum(counts)
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.bytes_sent = 0
        self._spares: dict[tuple[str, int, torch.device], Tensor] = {}
        self._turns: dict[str, int] = {}

    def spare(self, purpose: str, count: int, like: Tensor, *, depth: int) -> Tensor:
        """Memory for `count` numbers of the dtype of `like`, used again after `depth` calls for the same purpose.

        Fresh memory would be paged in at every exchange, which costs as much as the exchange itself.
        """
        turn = self._turns[purpose] = (self._turns.get(purpose, -1) + 1) % depth
        key, size = (purpose, turn, like.device), count * like.element_size()
        if key not in self._spares or len(self._spares[key]) < size:
            self._spares[key] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._spares[key][:size].view(like.dtype)

    def rounds(self, rows: Tensor) -> list[Round]:
        """All columns of a matrix that has `rows` as its part held here, in rounds."""
        width, num_columns = block_width(rows, self.size), rows.shape[1]
        num_blocks = -(-num_columns // width)
        message_of_a_block = width * rows.element_size() * max(1, self.size // self.num_ranks)
        at_once = self.num_ranks * max(1, MESSAGE_BYTES // message_of_a_block)
        rounds = []
        for first in range(0, num_blocks, at_once):
            shares = [
                balanced_share(min(at_once, num_blocks - first), rank, self.num_ranks) for rank in range(self.num_ranks)
            ]
            columns = [
                range(min((first + s.start) * width, num_columns), min((first + s.stop) * width, num_columns))
                for s in shares
            ]
            rounds.append(Round(tuple(columns), width))
        return rounds

    def start_gather(self, rows: Sequence[Tensor], counts: Sequence[int], turn: Round, *, like: Tensor) -> Wait:
        """Send the columns of the rows held here to the ranks that work on them, and get ours of all rows.

        Args:
            rows: the rows held here that take part, each a vector.
            counts: how many rows of each rank take part.
            turn: who works on which columns.
            like: says dtype and device where no row held here takes part.
        """
        mine = len(turn.columns[self.rank])
        parts = [row[part.start : part.stop] for part in turn.columns for row in rows]
        send = self.spare("send", sum(map(len, parts)), like, depth=2)
        if parts:
            torch.cat(parts, out=send)
        stage = self.spare("stage", sum(counts) * mine, like, depth=3).view(sum(counts), mine)
        return self.start(
            stage, send, [count * mine for count in counts], [len(rows) * len(part) for part in turn.columns]
        )

    def start_return(self, stage: Tensor, rows: Tensor, turn: Round) -> Callable[[], None]:
        """Hand the columns that were worked on here back to the rows' owners; what is returned puts ours in place."""
        mine, here = len(turn.columns[self.rank]), len(rows)
        back = self.spare("back", here * sum(map(len, turn.columns)), rows, depth=2)
        sizes = [here * len(part) for part in turn.columns]
        wait = self.start(back, stage, sizes, [count * mine for count in self.counts])

        def finish() -> None:
            for columns, part in zip(turn.columns, torch.split(wait(), sizes), strict=True):
                rows[:, columns.start : columns.stop].copy_(part.view(here, len(columns)))

        return finish

    def start_spread(self, target: Tensor, part: Tensor, sizes: Sequence[int]) -> Wait:
        """Send a part to everyone, so that everyone has all ranks' parts, of these sizes, one after the other."""
        return self.start(target, part.repeat(self.num_ranks), sizes, [len(part)] * self.num_ranks)

    def start(self, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]) -> Wait:
        """Send a part of `source` to each rank and fill `output` with theirs; sizes are counts of numbers."""
        # As bytes: not every backend knows every dtype.
        size = output.element_size()
        with plainly("exchanging members' numbers"):
            work = dist.all_to_all_single(
                output.view(-1).view(torch.uint8),
                source.contiguous().view(-1).view(torch.uint8),
                [count * size for count in received],
                [count * size for count in sent],
                group=self.group,
                async_op=True,
            )
        self.bytes_sent += (sum(sent) - sent[self.rank]) * size

        def wait() -> Tensor:
            assert work is not None
            assert source is not None  # what is being sent stays alive until then
            with plainly("exchanging members' numbers"):
                work.wait()
            return output

        return wait

    def stages(self, rows: Tensor, members: Sequence[int] | None = None) -> Iterator[tuple[Round, Tensor]]:
        """Round by round, the columns that this rank works on, of all rows, or of some members'; the next is under way.

        Args:
            rows: the rows held here.
            members: which members of the whole population take part; None for all.
        """
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        chosen = range(self.size) if members is None else members
        parts = [[m for m in chosen if end - count <= m < end] for end, count in zip(ends, self.counts, strict=True)]
        first = ends[self.rank] - self.counts[self.rank]
        vectors, counts = [rows[member - first] for member in parts[self.rank]], [len(part) for part in parts]
        rounds = self.rounds(rows)
        waits: list[Wait] = []
        for number, turn in enumerate(rounds):
            for later in rounds[number + len(waits) : number + 2]:
                waits.append(self.start_gather(vectors, counts, later, like=rows))
            yield turn, waits.pop(0)()


def blocks_of(stage: Tensor, turn: Round) -> list[Tensor]:
    """The blocks of what one rank works on in a round; none where nothing was left for it."""
    return list(torch.split(stage, turn.width, dim=1)) if stage.shape[1] else []
