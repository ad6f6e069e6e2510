"""The group of processes of one machine that map one matrix: every process sees all rows and trains its own.

To mix, each process multiplies its blocks of *columns* of all rows, between two barriers. The blocks do not depend on
the number of processes, so neither do the bits of the result. Members on accelerators keep their rows there and copy
them into the mapping and back around each product.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from papa.errors import ConfigError, MemberError, RunError
from papa.group.base import balanced_ranges
from papa.group.collectives import MultiProcessGroup, all_gather_object, connection_errors
from papa.product import column_blocks, combine_rows, mix_blocks_, squared_distances_by_block

MEMORY = "/dev/shm"
"""A directory in memory, where there is one."""


class SharedMemoryGroup(MultiProcessGroup):
    """The processes of one machine that hold a population.

    Needs an initialised `torch.distributed` process group whose ranks are all on this machine.

    Args:
        size: the number of members of the whole population.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if self.num_ranks > size:
            raise ConfigError(f"there are {self.num_ranks} workers for {size} members: use at most one for each")
        self._size = size
        self._members = self.local_range(size)
        self._local = slice(self._members.start, self._members.stop)
        self._mappings: dict[torch.dtype, Tensor] = {}

    def members(self, num_local: int) -> range:
        if num_local != len(self._members):
            raise MemberError(
                f"rank {self.rank} holds {num_local} members, expected {len(self._members)} of {self._size}"
            )
        return self._members

    def size(self, num_local: int) -> int:
        return self._size

    def is_staged(self, device: torch.device) -> bool:
        """Whether rows live in the memory of the device, and are copied into the mapping to be mixed."""
        return device.type != "cpu"

    def first_row(self, num_local: int, device: torch.device) -> int:
        return 0 if self.is_staged(device) else self._members.start

    def allocate(self, num_local: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A memory-backed file that all ranks map; it is unlinked as soon as they have."""
        self.members(num_local)
        path = self._create_file(self._size * num_columns * dtype.itemsize)
        mapping = torch.from_file(path, shared=True, size=self._size * num_columns, dtype=dtype)
        mapping = mapping.view(self._size, num_columns)
        self.barrier()
        if self.is_leader:
            os.unlink(path)
        if not self.is_staged(device):
            return mapping
        self._mappings[dtype] = mapping
        return torch.zeros(num_local, num_columns, dtype=dtype, device=device)

    def _create_file(self, num_bytes: int) -> str:
        """The path of a file that the leader makes for all."""
        paths = [""]
        if self.is_leader:
            paths[0] = reserve_file(num_bytes, (MEMORY, tempfile.gettempdir()))
        with connection_errors("sharing memory"):
            dist.broadcast_object_list(paths, src=0)
        return paths[0]

    def _share(self, rows: Tensor, *, synchronised: bool = False) -> Tensor:
        """The rows of all members in the mapping, once all ranks have written theirs."""
        shared = rows
        if self.is_staged(rows.device):
            shared = self._mappings[rows.dtype][:, : rows.shape[1]]
            shared[self._local].copy_(rows)
        if not synchronised or shared is not rows:
            self.barrier()
        return shared

    def _my_blocks(self, shared: Tensor) -> list[Tensor]:
        blocks = list(column_blocks(shared))
        mine = balanced_ranges(len(blocks), self.num_ranks)[self.rank]
        return blocks[mine.start : mine.stop]

    def mix_(self, rows: Tensor, matrix: Tensor, *, synchronised: bool = False) -> None:
        shared = self._share(rows, synchronised=synchronised)
        mix_blocks_(self._my_blocks(shared), matrix)
        self.barrier()
        if shared is not rows:
            rows.copy_(shared[self._local])

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Each rank reads all rows and computes the whole sum."""
        shared = self._share(rows)
        row = combine_rows(shared, weights, out if shared is rows else None)
        self.barrier()
        return row.to(rows.device) if out is None else out if out is row else out.copy_(row)

    def squared_distances(self, rows: Tensor) -> Tensor:
        """Each rank computes the part of its blocks; the parts are added in block order."""
        parts = squared_distances_by_block(self._my_blocks(self._share(rows)))
        return torch.cat(all_gather_object(parts)).sum(dim=0)


def reserve_file(num_bytes: int, directories: Sequence[str]) -> str:
    """A new file of this size in the first directory that has the space.

    The space is reserved: the system would end a process that writes to a mapped file for which there is none.
    """
    problems = []
    for directory in directories:
        try:
            with tempfile.NamedTemporaryFile(prefix="papa-", dir=directory, delete=False) as file:
                try:
                    _reserve(file.fileno(), num_bytes)
                except OSError:
                    os.unlink(file.name)
                    raise
                return file.name
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
    raise RunError(
        f"the workers need {num_bytes:,} bytes of shared memory ({'; '.join(problems)}): free some space, or use one "
        "worker"
    )


def _reserve(handle: int, num_bytes: int) -> None:
    if num_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, num_bytes)
    else:
        os.truncate(handle, num_bytes)
