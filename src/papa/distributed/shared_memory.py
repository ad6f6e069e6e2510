"""The group of processes of one machine that map one matrix: every process sees all rows and trains its own.

To mix, each process multiplies its blocks of *columns* of all rows, between two barriers. The blocks do not depend on
the number of processes, so neither do the bits of the result. Members on accelerators keep their rows there and copy
them into the mapping and back around each product.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from papa.core.group import Work, balanced_ranges
from papa.core.product import (
    Columns,
    Lines,
    block_width,
    chosen_columns,
    write_columns_,
)
from papa.distributed.collectives import MultiProcessGroup, connection_errors
from papa.errors import ConfigError, MemberError, RunError

T = TypeVar("T")

MEMORY = "/dev/shm"
"""A directory in memory, where there is one."""


class SharedMemoryGroup(MultiProcessGroup):
    """The processes of one machine that hold a population of `size` members.

    Needs an initialised `torch.distributed` process group whose ranks are all on this machine.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if self.num_ranks > size:
            raise ConfigError(f"there are {self.num_ranks} workers for {size} members: use at most one for each")
        self._size = size
        self._members = self.local_range(size)
        self._local = slice(self._members.start, self._members.stop)
        self._mappings: list[tuple[weakref.ref[Tensor], Tensor]] = []
        """Rows in the memory of an accelerator, and the mapping that they are copied into."""

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

    def allocate(
        self, num_local: int, num_columns: int, *, dtype: torch.dtype, device: torch.device, single: bool = False
    ) -> Tensor:
        """A memory-backed file that all ranks map; it is unlinked as soon as they have."""
        self.members(num_local)
        num_rows = 1 if single else self._size
        path = self._create_file(num_rows * num_columns * dtype.itemsize)
        mapping = torch.from_file(path, shared=True, size=num_rows * num_columns, dtype=dtype)
        mapping = mapping.view(num_rows, num_columns)
        self.barrier()
        if self.is_leader:
            os.unlink(path)
        if not self.is_staged(device):
            return mapping
        rows = torch.zeros(1 if single else num_local, num_columns, dtype=dtype, device=device)
        self._mappings = [(staged, other) for staged, other in self._mappings if staged() is not None]
        self._mappings.append((weakref.ref(rows), mapping))
        return rows

    def _create_file(self, num_bytes: int) -> str:
        """The path of a file that the leader makes for all."""
        paths = [""]
        if self.is_leader:
            paths[0] = reserve_file(num_bytes, (MEMORY, tempfile.gettempdir()))
        with connection_errors("sharing memory"):
            dist.broadcast_object_list(paths, src=0)
        return paths[0]

    def _mapping_of(self, rows: Tensor) -> Tensor:
        """The mapping of rows, or of their first columns; the rows themselves where they are in it."""
        if not self.is_staged(rows.device):
            return rows
        for staged, mapping in self._mappings:
            owner = staged()
            if owner is not None and owner.data_ptr() == rows.data_ptr():
                return mapping[:, : rows.shape[1]]
        raise AssertionError("these rows were not allocated by this group")

    def map_columns(
        self,
        parts: Sequence[Tensor],
        work: Work[T],
        *,
        changes: Collection[int] = (0,),
        columns: Columns = None,
        singles: Collection[int] = (),
        copies: Collection[int] = (),
        members: Sequence[int] | None = None,
        chosen: Sequence[Tensor] | None = None,
        synchronised: bool = False,
    ) -> list[T]:
        """Each rank works on its blocks in place; where there are copies to write, on all blocks.

        Members on accelerators send and receive these columns only.
        """
        is_staged = self.is_staged(parts[0].device)
        shared = [part.cpu() if number in copies else self._mapping_of(part) for number, part in enumerate(parts)]
        own = [
            mapping if number in singles or number in copies else mapping[self._local]
            for number, mapping in enumerate(shared)
        ]
        if is_staged:
            for number, (part, mapping) in enumerate(zip(parts, own, strict=True)):
                if number not in copies and (number not in singles or self.rank == 0):
                    _copy_columns_(mapping, part, columns)
        if is_staged or not synchronised:
            self.barrier()
        num_columns = len(columns) if isinstance(columns, Lines) else chosen_columns(shared[0], columns).shape[1]
        num_rows = sum(len(mapping) for number, mapping in enumerate(shared) if number not in copies)
        width = block_width(shared[0], num_rows, num_columns)
        blocks = range(-(-num_columns // width))
        mine = blocks if copies else balanced_ranges(len(blocks), self.num_ranks)[self.rank]
        start, stop = mine.start * width, min(mine.stop * width, num_columns)
        done = []
        if start < stop:
            local = _part_of(columns, start, stop, shared[0].shape[1])
            found = [chosen_columns(mapping, local) for mapping in shared]
            done.append(work(found, start, width))
            for number in changes:
                write_columns_(shared[number], local, found[number])
        if changes:
            self.barrier()
        if is_staged:
            for number in changes:
                _copy_columns_(parts[number], own[number], columns)
        return done


def _copy_columns_(target: Tensor, source: Tensor, columns: Columns) -> None:
    """Copy some columns between a mapping and the memory of an accelerator."""
    if isinstance(columns, Lines):
        values = chosen_columns(source, columns.to(source.device)).to(target.device)
        write_columns_(target, columns.to(target.device), values)
    else:
        chosen_columns(target, columns).copy_(chosen_columns(source, columns))


def _part_of(columns: Columns, start: int, stop: int, num_columns: int) -> Columns:
    """The columns from one position to another among the chosen ones of a matrix with `num_columns`."""
    if isinstance(columns, Lines):
        return columns.part(start, stop).to(torch.device("cpu"))
    first = 0 if columns is None else columns.indices(num_columns)[0]
    return slice(first + start, first + stop)


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
