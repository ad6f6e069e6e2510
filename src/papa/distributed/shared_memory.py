"""The group of processes of one machine that map one matrix: every process sees all rows and trains its own.

To mix, each process multiplies its blocks of *columns* of all rows, between two barriers. The blocks do not depend on
the number of processes, so neither do the bits of the result. Members on accelerators keep their rows there and copy
them into the mapping and back around each product.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from papa.core.columns import Columns, Lines, chosen_columns, write_columns_
from papa.core.group import balanced_ranges
from papa.core.product import (
    BlockUpdate,
    block_width,
    combine_rows,
    mix_columns_,
    push_columns_,
    squared_distances_by_block,
    update_blocks_,
)
from papa.distributed.collectives import MultiProcessGroup, all_gather_object, connection_errors
from papa.errors import ConfigError, MemberError, RunError

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

    def _share(self, rows: Tensor, *, synchronised: bool = False) -> Tensor:
        """The rows of all members in the mapping, once all ranks have written theirs."""
        shared = self._mapping_of(rows)
        if shared is not rows:
            shared[self._local].copy_(rows)
        if not synchronised or shared is not rows:
            self.barrier()
        return shared

    def _mapping_of(self, rows: Tensor) -> Tensor:
        """The mapping of rows, or of their first columns; the rows themselves where they are in it."""
        if not self.is_staged(rows.device):
            return rows
        for staged, mapping in self._mappings:
            owner = staged()
            if owner is not None and owner.data_ptr() == rows.data_ptr():
                return mapping[:, : rows.shape[1]]
        raise AssertionError("these rows were not allocated by this group")

    def _my_columns(self, shared: Tensor) -> tuple[Tensor, int]:
        """The columns of this rank's blocks, and the width of a block."""
        width = block_width(shared, *shared.shape)
        mine = balanced_ranges(-(-shared.shape[1] // width), self.num_ranks)[self.rank]
        return shared[:, mine.start * width : mine.stop * width], width

    def mix_(self, rows: Tensor, matrix: Tensor, *, synchronised: bool = False) -> None:
        self._change_columns_(
            rows, lambda columns, width: mix_columns_(columns, matrix, width), synchronised=synchronised
        )

    def push_(self, rows: Tensor, keep: float, *, synchronised: bool = False) -> None:
        self._change_columns_(
            rows, lambda columns, width: push_columns_(columns, keep, width), synchronised=synchronised
        )

    def _change_columns_(
        self, rows: Tensor, change_: Callable[[Tensor, int], None], *, synchronised: bool = False
    ) -> None:
        shared = self._share(rows, synchronised=synchronised)
        change_(*self._my_columns(shared))
        self.barrier()
        if shared is not rows:
            rows.copy_(shared[self._local])

    def update_(
        self,
        parts: Sequence[Tensor],
        update: BlockUpdate,
        *,
        columns: Columns = None,
        singles: Collection[int] = (),
        chosen: Sequence[Tensor] | None = None,
        synchronised: bool = False,
    ) -> None:
        """Each rank updates its blocks; members on accelerators send and receive the chosen columns only."""
        shared = [self._mapping_of(rows) for rows in parts]
        is_staged = shared[0] is not parts[0]
        own = [mapping if number in singles else mapping[self._local] for number, mapping in enumerate(shared)]
        if is_staged:
            for number, (rows, mapping) in enumerate(zip(parts, own, strict=True)):
                if number not in singles or self.rank == 0:
                    _copy_columns_(mapping, rows, columns)
        if is_staged or not synchronised:
            self.barrier()
        num_columns = _num_columns(shared[0], columns)
        width = block_width(shared[0], sum(map(len, shared)), num_columns)
        mine = balanced_ranges(-(-num_columns // width), self.num_ranks)[self.rank]
        start, stop = mine.start * width, min(mine.stop * width, num_columns)
        if start < stop:
            local = _part_of(columns, start, stop, shared[0].shape[1])
            found = [chosen_columns(mapping, local) for mapping in shared]
            update_blocks_(found, update, width=width, start=start)
            for mapping, part in zip(shared, found, strict=True):
                write_columns_(mapping, local, part)
        self.barrier()
        if is_staged:
            for rows, mapping in zip(parts, own, strict=True):
                _copy_columns_(rows, mapping, columns)

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Each rank reads all rows and computes the whole sum."""
        shared = self._share(rows)
        row = combine_rows(shared, weights, out if shared is rows else None)
        self.barrier()
        return row.to(rows.device) if out is None else out if out is row else out.copy_(row)

    def squared_distances(self, rows: Tensor) -> Tensor:
        """Each rank computes the part of its blocks; the parts are added in block order."""
        parts = squared_distances_by_block(*self._my_columns(self._share(rows)))
        return torch.cat(all_gather_object(parts)).sum(dim=0)


def _copy_columns_(target: Tensor, source: Tensor, columns: Columns) -> None:
    """Copy some columns between a mapping and the memory of an accelerator."""
    if isinstance(columns, Lines):
        values = chosen_columns(source, columns.to(source.device)).to(target.device)
        write_columns_(target, columns.to(target.device), values)
    else:
        chosen_columns(target, columns).copy_(chosen_columns(source, columns))


def _num_columns(rows: Tensor, columns: Columns) -> int:
    if isinstance(columns, Lines):
        return len(columns)
    return len(range(rows.shape[1])[slice(None) if columns is None else columns])


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
