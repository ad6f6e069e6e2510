"""Several processes of one machine that see one matrix: every row is mapped by all, each trains its own.

To mix, each process multiplies its share of the *columns* of all rows between two barriers, in blocks whose
boundaries do not depend on who holds what. So the result is the same, bit for bit, however members are spread. Members
on accelerators keep their rows there and copy them into the mapping and back around each product.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from papa.errors import ConfigError, MemberError
from papa.group.notes import notes_of_all
from papa.group.plainly import plainly
from papa.product import column_blocks, combine_rows, mix_blocks_, squared_distances_by_block

T = TypeVar("T")


def balanced_share(size: int, rank: int, num_ranks: int) -> range:
    """The contiguous part of `size` things that belongs to a rank; parts differ by one at the most.

    Example:
        >>> [balanced_share(5, rank, 2) for rank in range(2)]
        [range(0, 3), range(3, 5)]
    """
    least, more = divmod(size, num_ranks)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


class SharedMemoryGroup:
    """The processes of one machine that hold a population together.

    Args:
        size: the number of members of the whole population.

    Needs an initialised `torch.distributed` process group whose ranks are all on this machine.
    """

    def __init__(self, size: int) -> None:
        self.rank: int = dist.get_rank()
        self.num_ranks: int = dist.get_world_size()
        if self.num_ranks > size:
            raise ConfigError(f"there are {self.num_ranks} workers for {size} members: use at most one for each")
        self._size = size
        self._mine = balanced_share(size, self.rank, self.num_ranks)
        self._stages: dict[torch.dtype, Tensor] = {}

    is_alone = False
    bytes_sent = 0

    @property
    def leads(self) -> bool:
        """Rank 0 does."""
        return self.rank == 0

    def share(self, size: int) -> range:
        """A contiguous, balanced part."""
        return balanced_share(size, self.rank, self.num_ranks)

    def members(self, num_here: int) -> range:
        """This rank's part."""
        if num_here != len(self._mine):
            raise MemberError(f"rank {self.rank} holds {num_here} members, expected {len(self._mine)} of {self._size}")
        return self._mine

    def size(self, num_here: int) -> int:
        """All members of all ranks."""
        return self._size

    def place(self, device: torch.device) -> torch.device:
        """An accelerator of its own for each rank; the CPU is shared."""
        index: int | None = device.index
        if device.type == "cpu" or index is not None:
            return device
        return torch.device(device.type, self.rank)

    def is_staged(self, device: torch.device) -> bool:
        """Whether rows live in the device's own memory, and meet in the mapping only to be mixed."""
        return device.type != "cpu"

    def first_row(self, num_here: int, device: torch.device) -> int:
        """The mapping has all rows, an accelerator its own."""
        return 0 if self.is_staged(device) else self._mine.start

    def allocate(self, num_here: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A file in memory that every rank maps; its name is gone as soon as all have."""
        self.members(num_here)
        path = self._agree_on_path(self._size * num_columns * dtype.itemsize)
        flat = torch.from_file(path, shared=True, size=self._size * num_columns, dtype=dtype)
        self.wait()
        if self.leads:
            os.unlink(path)
        mapping = flat.view(self._size, num_columns)
        if not self.is_staged(device):
            return mapping
        self._stages[dtype] = mapping
        return torch.zeros(num_here, num_columns, dtype=dtype, device=device)

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        """Every rank compares all ranks' facts, so all raise together."""
        with plainly("comparing notes"):
            everyone = notes_of_all(dict(facts))
        check_all_same(everyone, cure=cure)

    def _agree_on_path(self, num_bytes: int) -> str:
        paths = [""]
        if self.leads:
            handle, paths[0] = tempfile.mkstemp(prefix="papa-", dir=_memory_directory(num_bytes))
            os.truncate(handle, num_bytes)
            os.close(handle)
        with plainly("agreeing on memory"):
            dist.broadcast_object_list(paths, src=0)
        return paths[0]

    def _published(self, rows: Tensor, *, met: bool = False) -> Tensor:
        """The mapping, once every rank has put its rows there."""
        host = rows
        if self.is_staged(rows.device):
            host = self._stages[rows.dtype][:, : rows.shape[1]]
            host[self._mine.start : self._mine.stop].copy_(rows)
        if not met or host is not rows:
            self.wait()
        return host

    def mix_(self, rows: Tensor, matrix: Tensor, *, met: bool = False) -> None:
        """Each rank multiplies its share of the column blocks, between two barriers."""
        host = self._published(rows, met=met)
        mix_blocks_(self._my_blocks(host), matrix)
        self.wait()
        if host is not rows:
            rows.copy_(host[self._mine.start : self._mine.stop])

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Every rank reads all rows and computes the sum alone."""
        host = self._published(rows)
        row = combine_rows(host, weights, out if host is rows else None)
        self.wait()
        return row.to(rows.device) if out is None else out if out is row else out.copy_(row)

    def begin_mean(self, rows: Tensor, snapshot: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """At once: reading memory is nothing to wait for."""
        mean = self.combine(rows, weights)
        return lambda: mean

    def agree_(self, columns: Tensor) -> None:
        """One process trains each member."""

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Members are whole."""
        return values

    def last_means(self) -> dict[torch.dtype, Tensor]:
        """None: nothing is sent."""
        return {}

    def set_last_means(self, means: Mapping[torch.dtype, Tensor]) -> None:
        """Nothing to set."""

    def squared_distances(self, rows: Tensor) -> Tensor:
        """Each rank's share of the blocks, added up in block order."""
        host = self._published(rows)
        mine = squared_distances_by_block(self._my_blocks(host))
        with plainly("comparing notes"):
            parts = notes_of_all(mine)
        return torch.cat(parts).sum(dim=0)

    def _my_blocks(self, rows: Tensor) -> list[Tensor]:
        blocks = list(column_blocks(rows))
        mine = balanced_share(len(blocks), self.rank, self.num_ranks)
        return blocks[mine.start : mine.stop]

    def gather(self, values: list[T]) -> list[T]:
        """Every rank's values, in member order."""
        with plainly("comparing notes"):
            parts = notes_of_all(values)
        return [value for part in parts for value in part]

    def highest(self, *values: float) -> tuple[float, ...]:
        """By one small exchange."""
        with plainly("comparing notes"):
            return highest_of(values, None)

    def wait(self) -> None:
        """A barrier."""
        with plainly("waiting for the others"):
            dist.barrier()


def highest_of(values: Sequence[float], group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """The highest of each that any process of a group has; None for all processes."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return tuple(numbers.tolist())


def check_all_same(everyone: Sequence[Mapping[str, str]], *, cure: str, ranks: Sequence[int] | None = None) -> None:
    """Raise a `MemberError` that names the first rank and fact that differ from the first rank's.

    Args:
        everyone: each rank's facts.
        cure: what to do about it.
        ranks: what to call the ranks; None for 0, 1, ...
    """
    names = range(len(everyone)) if ranks is None else ranks
    for rank, theirs in zip(names, everyone, strict=True):
        for name in sorted(everyone[0].keys() | theirs.keys()):
            found, expected = theirs.get(name, "nothing"), everyone[0].get(name, "nothing")
            if found != expected:
                raise MemberError(f"rank {rank} has {found} as '{name}', rank {names[0]} has {expected}: {cure}")


def _memory_directory(num_bytes: int) -> str:
    """Memory-backed where there is room; else the directory for temporary files, whose pages stay in memory too."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > num_bytes:
        return str(memory)
    return tempfile.gettempdir()
