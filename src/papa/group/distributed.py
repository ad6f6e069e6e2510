"""Processes on any number of machines: each holds the rows of its own members and nobody else's.

Whatever needs numbers of several members is computed on columns that travel (`papa.group.exchange`), with the bits of
one process; pushes and merges of all may instead be made of sums over processes (`papa.group.reduce`), which is
faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from papa import mixing
from papa.errors import ConfigError, MemberError, did_you_mean
from papa.group.background import Background
from papa.group.exchange import Wires, blocks_of
from papa.group.notes import notes_of_all
from papa.group.plainly import plainly
from papa.group.reduce import AllReduced, Differences, Mean, mean_chunks
from papa.group.shared_memory import balanced_share, check_all_same, highest_of
from papa.product import combine_block_, is_finite, mix_blocks_, squared_distances_by_block

T = TypeVar("T")

EXCHANGES = {
    "exact": "columns travel and are mixed with the bits of one process",
    "fast": "pushes and merges of all by a float32 all-reduce, whose last bits depend on how members are spread",
    "bfloat16": "as fast, sending differences to the last mean as bfloat16",
}


class DistributedGroup:
    """Processes that hold a population together, each its own members.

    Args:
        group: the processes, one or more members on each; None for all of `torch.distributed`.
        exchange: `exact`, `fast` or `bfloat16`; see `EXCHANGES`.
        data: the processes that train the same member as this one, where there are several; its rank 0 counts where
            they differ (BatchNorm statistics).
    """

    is_alone = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        exchange: str = "exact",
        data: dist.ProcessGroup | None = None,
    ) -> None:
        if exchange not in EXCHANGES:
            raise ConfigError(f"exchange is {exchange}: {did_you_mean(exchange, EXCHANGES)}")
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed has no process group: call torch.distributed.init_process_group() first, under "
                "torchrun for instance"
            )
        world = dist.group.WORLD
        assert world is not None
        self.exchange = exchange
        self._group = group if group is not None else world
        self._data = data
        self.rank: int = dist.get_rank(self._group)
        self.num_ranks: int = dist.get_world_size(self._group)
        self._wires: Wires | None = None
        self._means: dict[torch.dtype, Tensor] = {}
        self._background: tuple[Wires, Background] | None = None

    @property
    def leads(self) -> bool:
        """Rank 0 of all processes does."""
        return dist.get_rank() == 0

    @property
    def bytes_sent(self) -> int:
        """What this rank sent of its members' numbers so far."""
        wires = [self._wires, self._background[0] if self._background else None]
        return sum(one.bytes_sent for one in wires if one is not None)

    def share(self, size: int) -> range:
        """A contiguous, balanced part."""
        if self.num_ranks > size:
            raise ConfigError(
                f"there are {self.num_ranks} ranks for {size} members: start at most one for each, or let several "
                "train one member, in a script of your own with a device mesh (population, data)"
            )
        return balanced_share(size, self.rank, self.num_ranks)

    def members(self, num_here: int) -> range:
        """After those of the ranks before."""
        wires = self._connected(num_here)
        start = sum(wires.counts[: self.rank])
        return range(start, start + num_here)

    def size(self, num_here: int) -> int:
        """All members of all ranks."""
        return self._connected(num_here).size

    def _connected(self, num_here: int) -> Wires:
        """The wires, once all ranks have told each other how many members they hold."""
        if self._wires is None:
            everyone = self._everyones((num_here, self.exchange))
            ranks = dist.get_process_group_ranks(self._group)
            exchanges = [{"exchange": exchange} for _, exchange in everyone]
            check_all_same(exchanges, cure="give every process the same", ranks=ranks)
            self._wires = Wires(self._group, [count for count, _ in everyone])
        if self._wires.counts[self.rank] != num_here:
            raise MemberError(
                f"this group holds a population with {self._wires.counts[self.rank]} members on rank {self.rank}, got "
                f"{num_here}: make a group for each population"
            )
        return self._wires

    def _everyones(self, value: T) -> list[T]:
        with plainly("comparing notes"):
            return notes_of_all(value, self._group)

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        """Every rank compares all ranks' facts, so all raise together."""
        everyone = self._everyones(dict(facts))
        check_all_same(everyone, cure=cure, ranks=dist.get_process_group_ranks(self._group))

    def place(self, device: torch.device) -> torch.device:
        """An accelerator of its own for each rank of a machine; the CPU is shared."""
        index: int | None = device.index
        if device.type == "cpu" or index is not None:
            return device
        return torch.device(device.type, int(os.environ.get("LOCAL_RANK", self.rank)))

    def first_row(self, num_here: int, device: torch.device) -> int:
        """The first: there are no others'."""
        return 0

    def allocate(self, num_here: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An ordinary zeroed tensor for the rows of this rank's members."""
        self._connected(num_here)
        return torch.zeros(num_here, num_columns, dtype=dtype, device=device)

    def agree_(self, columns: Tensor) -> None:
        """Among the processes that train one member, data rank 0's numbers count."""
        if self._data is not None and columns.numel():
            whole = columns.contiguous()
            with plainly("agreeing on buffers"):
                dist.broadcast(_as_bytes(whole), dist.get_global_rank(self._data, 0), group=self._data)
            columns.copy_(whole)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Values of each process's shard of a member, added up in rank order."""
        if self._data is None:
            return values
        with plainly("adding up shards"):
            parts = notes_of_all(values, self._data)
        return torch.stack(parts).sum(dim=0)

    def mix_(self, rows: Tensor, matrix: Tensor, *, met: bool = False) -> None:
        """Every rank mixes some columns of all rows; or, for a push, everyone learns the mean."""
        keep = None if self.exchange == "exact" else mixing.push_strength(matrix)
        if keep is None or rows.is_complex():
            self._mix_columns_(rows, matrix)
        else:
            self._push_(rows, keep)

    def _mix_columns_(self, rows: Tensor, matrix: Tensor) -> None:
        wires = self._connected(len(rows))
        finish: Callable[[], None] | None = None
        for turn, stage in wires.stages(rows):
            mix_blocks_(blocks_of(stage, turn), matrix)
            finish, previous = wires.start_return(stage, rows, turn), finish
            if previous is not None:
                previous()
        if finish is not None:
            finish()

    def _push_(self, rows: Tensor, keep: float) -> None:
        wires = self._connected(len(rows))
        for columns, wide, mean in mean_chunks(rows, self._mean_by(wires, rows)):
            wide.lerp_(mean, 1.0 - keep)
            if wide.dtype != rows.dtype:
                rows[:, columns].copy_(wide)

    def _mean_by(self, wires: Wires, rows: Tensor) -> Mean:
        """How the mean is made, chunk by chunk."""
        if self.exchange == "fast":
            return AllReduced(wires)
        dtype = rows.dtype if rows.element_size() >= 4 else torch.float32
        last = self._means.get(rows.dtype)
        is_new = last is None or not is_finite(last)  # a difference to what is not finite never is
        if is_new:
            self._means[rows.dtype] = torch.zeros(rows.shape[1], dtype=dtype, device=rows.device)
        return Differences(wires, self._means[rows.dtype], is_new=is_new)

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Every rank sums some columns and sends them to all; members of weight 0 send nothing."""
        return _combined(self._connected(len(rows)), rows, weights, out)

    def begin_mean(self, rows: Tensor, snapshot: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """The mean of all rows, made in the background from the snapshots; what is returned waits for it."""
        wires, thread = self._in_background(len(rows))
        is_cuda = rows.device.type == "cuda"
        stream = torch.cuda.Stream(rows.device) if is_cuda else None  # type: ignore[no-untyped-call]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(rows.device))

        def work() -> Tensor:
            with torch.cuda.stream(stream):
                return self._mean(wires, snapshot, weights)

        future = thread.submit(work)

        def finish() -> Tensor:
            mean = future.result()
            if stream is not None:
                torch.cuda.current_stream(rows.device).wait_stream(stream)
            return mean

        return finish

    def _mean(self, wires: Wires, rows: Tensor, weights: Tensor) -> Tensor:
        is_of_all = bool((weights == weights[0]).all())
        if self.exchange == "exact" or rows.is_complex() or not is_of_all:
            return _combined(wires, rows, weights)
        mean = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
        for columns, _, part in mean_chunks(rows, self._mean_by(wires, rows)):
            mean[columns].copy_(part)
        return mean

    def _in_background(self, num_here: int) -> tuple[Wires, Background]:
        """Wires of their own, so that what travels in the background never waits for, or overtakes, anything else."""
        if self._background is None:
            ranks = dist.get_process_group_ranks(self._group)
            with plainly("opening a second connection"):
                group = dist.new_group(ranks, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._background = Wires(group, self._connected(num_here).counts), Background()
        return self._background

    def squared_distances(self, rows: Tensor) -> Tensor:
        """Every rank some columns' part, added up in block order."""
        wires = self._connected(len(rows))
        mine = [
            (turn.columns[self.rank].start, squared_distances_by_block(blocks_of(stage, turn)))
            for turn, stage in wires.stages(rows)
            if stage.shape[1]
        ]
        parts = sorted((part for parts in self._everyones(mine) for part in parts), key=lambda part: part[0])
        nothing = torch.zeros(1, wires.size, dtype=torch.float64)
        return torch.cat([part for _, part in parts] or [nothing]).sum(dim=0)

    def gather(self, values: list[T]) -> list[T]:
        """Every rank's values, in member order."""
        return [value for part in self._everyones(values) for value in part]

    def highest(self, *values: float) -> tuple[float, ...]:
        """Also of those that train the same member."""
        with plainly("comparing notes"):
            found = highest_of(values, self._group)
            return found if self._data is None else highest_of(found, self._data)

    def wait(self) -> None:
        """A barrier."""
        with plainly("waiting for the others"):
            dist.barrier(self._group)

    def last_means(self) -> dict[torch.dtype, Tensor]:
        """What must be kept to go on exactly: the mean that the next differences are taken to, by dtype."""
        return dict(self._means)

    def set_last_means(self, means: Mapping[torch.dtype, Tensor]) -> None:
        """Go on where `last_means` was taken."""
        self._means = {dtype: mean.clone() for dtype, mean in means.items()}


def _combined(wires: Wires, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    combined = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device) if out is None else out
    used = [member for member, weight in enumerate(weights.tolist()) if weight]
    numbers = [weight for weight in weights.tolist() if weight]
    previous: Callable[[], Tensor] | None = None
    for turn, stage in wires.stages(rows, used):
        part = torch.empty(stage.shape[1], dtype=rows.dtype, device=rows.device)
        for block, target in zip(blocks_of(stage, turn), blocks_of(part[None], turn), strict=True):
            combine_block_(target[0], zip(block, numbers, strict=True))
        following = wires.start_spread(combined[turn.all], part, [len(columns) for columns in turn.columns])
        if previous is not None:
            previous()
        previous = following
    if previous is not None:
        previous()
    return combined


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
