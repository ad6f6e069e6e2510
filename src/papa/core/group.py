"""The interface of the processes that hold a population, and its implementation for one process."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.columns import Columns, chosen_columns, write_columns_
from papa.core.product import (
    BlockUpdate,
    block_width,
    combine_rows,
    mix_rows_,
    push_columns_,
    squared_distances,
    update_blocks_,
)
from papa.errors import PapaError

T = TypeVar("T")
LEAST_HUGE_BYTES = 16 << 20
"""The size of a matrix from which on it is worth having in huge pages."""


class Group(Protocol):
    """The processes that hold a population.

    *Local* means on this process. `rows` is what `allocate` returned, or some columns of it. All processes must call a
    method that returns something about the whole population.
    """

    num_ranks: int
    """The number of processes."""
    is_local: bool
    """Whether one process holds all members, and may change the layout of the matrix."""
    is_leader: bool
    """Whether this process writes the files and prints."""

    @property
    def bytes_sent(self) -> int:
        """The number of bytes of weights that this process has sent to others."""
        return 0

    def local_range(self, size: int) -> range:
        """The indices of the members that this process holds in a population of `size`."""

    def members(self, num_local: int) -> range:
        """The indices, within the whole population, of the `num_local` local members."""

    def size(self, num_local: int) -> int:
        """The number of members of the whole population."""

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        """Raise a `MemberError` that names the first rank and fact that differ from those of the first rank."""

    def local_device(self, device: torch.device) -> torch.device:
        """The device that this process trains on when the run trains on `device`."""

    def allocate(
        self, num_local: int, num_columns: int, *, dtype: torch.dtype, device: torch.device, single: bool = False
    ) -> Tensor:
        """Zeroed memory for the rows of the local members, or of all members where memory is shared.

        With `single`, one row for the whole population instead, which belongs to the first member's process.
        """

    def first_row(self, num_local: int, device: torch.device) -> int:
        """The index of the first local member's row in what `allocate` returns."""
        return 0

    def mix_(self, rows: Tensor, matrix: Tensor, *, synchronised: bool = False) -> None:
        """`rows <- matrix @ rows` over the members of all processes, each of which has a row in the matrix.

        `synchronised`: all processes have synchronised since rows last changed, so no barrier is needed first.
        """

    def push_(self, rows: Tensor, keep: float, *, synchronised: bool = False) -> None:
        """`mix_` with the matrix of a push, in which each member keeps the share `keep` of itself."""
        self.mix_(rows, mixing.push(self.size(len(rows)), keep), synchronised=synchronised)

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
        """Change columns of several matrices, block by block.

        Args:
            parts: what `allocate` returned, of one dtype: the rows of members, and extra rows.
            update: gets the rows of all processes for a block of columns, and changes them in place.
            columns: which columns; None for all. Only these are read, sent and written.
            singles: which parts have a single row instead of one for each member.
            chosen: the chosen columns of the local rows, if they were read already; may be changed.
            synchronised: as for `mix_`.
        """

    def update_copies_(self, rows: Tensor, update: BlockUpdate) -> None:
        """Apply an update of all members' rows where the local ones were not allocated here; for few columns."""
        everyone = torch.stack(self.all_gather(list(rows)))
        update([everyone], 0)
        members = self.members(len(rows))
        rows.copy_(everyone[members.start : members.stop])

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """The weighted sum of all members' rows, in `out` or a new row; members of weight 0 are not read."""

    def squared_distances(self, rows: Tensor) -> Tensor:
        """The squared distance of every member of the population to the mean row, in float64.

        On the device of the rows if one process has all of them, otherwise on the CPU.
        """

    def broadcast_(self, columns: Tensor) -> None:
        """Copy the values of data rank 0 to all processes that train the same member."""
        return

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """The sum of `values` over the processes that hold shards of the same member."""
        return values

    def all_gather(self, values: list[T]) -> list[T]:
        """The values of all processes in rank order, which is member order for one value per local member."""

    def all_max(self, *values: float) -> tuple[float, ...]:
        """The maximum of each value over all processes; much cheaper than `all_gather`."""

    def barrier(self) -> None:
        """Return when all processes have called this."""


class LocalGroup(Group):
    """One process holds every member."""

    num_ranks = 1
    is_local = True
    is_leader = True

    def local_range(self, size: int) -> range:
        return range(size)

    def members(self, num_local: int) -> range:
        return range(num_local)

    def size(self, num_local: int) -> int:
        return num_local

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        pass

    def local_device(self, device: torch.device) -> torch.device:
        return device

    def allocate(
        self, num_local: int, num_columns: int, *, dtype: torch.dtype, device: torch.device, single: bool = False
    ) -> Tensor:
        return zeros(1 if single else num_local, num_columns, dtype=dtype, device=device)

    def mix_(self, rows: Tensor, matrix: Tensor, *, synchronised: bool = False) -> None:
        mix_rows_(rows, matrix)

    def push_(self, rows: Tensor, keep: float, *, synchronised: bool = False) -> None:
        push_columns_(rows, keep)

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
        chosen = chosen or [chosen_columns(rows, columns) for rows in parts]
        update_blocks_(chosen, update, width=block_width(parts[0], sum(map(len, parts)), chosen[0].shape[1]))
        for rows, part in zip(parts, chosen, strict=True):
            write_columns_(rows, columns, part)

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        return combine_rows(rows, weights, out)

    def squared_distances(self, rows: Tensor) -> Tensor:
        return squared_distances(rows)

    def all_gather(self, values: list[T]) -> list[T]:
        return list(values)

    def all_max(self, *values: float) -> tuple[float, ...]:
        return values

    def barrier(self) -> None:
        pass


def zeros(num_rows: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix of zeros; if it is large, in huge pages where the system has them: passes over it are a tenth faster."""
    num_bytes = num_rows * num_columns * dtype.itemsize
    if device.type != "cpu" or num_bytes < LEAST_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_rows, num_columns, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, num_columns)


def gather_or_raise(group: Group, work: Callable[[], list[T]]) -> list[T]:
    """The values that `work` returns on all processes; a `PapaError` of one process is raised on all.

    Otherwise the other processes would wait for the one that failed.

    Example:
        >>> gather_or_raise(LocalGroup(), lambda: [1, 2])
        [1, 2]
    """
    values: list[T] = []
    error: PapaError | None = None
    try:
        values = work()
    except PapaError as caught:
        error = caught
    for found in group.all_gather([error]):
        if found is not None:
            raise found
    return group.all_gather(values)


def balanced_ranges(size: int, num_ranks: int) -> list[range]:
    """`size` indices as one contiguous range for each rank; their lengths differ by at most one.

    Example:
        >>> balanced_ranges(5, 2)
        [range(0, 3), range(3, 5)]
    """
    shortest, num_longer = divmod(size, num_ranks)
    starts = [rank * shortest + min(rank, num_longer) for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
