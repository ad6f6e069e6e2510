"""The interface of the processes that hold a population, and its implementation for one process."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from papa.core.product import (
    BlockUpdate,
    Columns,
    block_width,
    chosen_columns,
    combine_columns_,
    mix_columns_,
    push_columns_,
    squared_distances_by_block,
    update_blocks_,
    write_columns_,
)
from papa.errors import ConfigError, PapaError

T = TypeVar("T")
Work: TypeAlias = Callable[[list[Tensor], int, int], T]
"""Works on some whole blocks of columns: given these columns of each matrix, the position of the first of them and the
number of columns in a block."""

LEAST_HUGE_BYTES = 16 << 20
"""The size of a matrix from which on it is worth having in huge pages."""


class Group(ABC):
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
    is_first_of_member: bool = True
    """Whether this process is the first of those that train its member."""

    @property
    def bytes_sent(self) -> int:
        """The number of bytes of weights that this process has sent to others."""
        return 0

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Raise a `MemberError` if a wrapper's processes hold different members. All processes must call it."""
        return

    @abstractmethod
    def local_range(self, size: int) -> range:
        """The indices of the members that this process holds in a population of `size`."""

    @abstractmethod
    def members(self, num_local: int) -> range:
        """The indices, within the whole population, of the `num_local` local members."""

    @abstractmethod
    def size(self, num_local: int) -> int:
        """The number of members of the whole population."""

    @abstractmethod
    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        """Raise a `MemberError` that names the first rank and fact that differ from those of the first rank."""

    @abstractmethod
    def local_device(self, device: torch.device) -> torch.device:
        """The device that this process trains on when the run trains on `device`."""

    @abstractmethod
    def allocate(
        self, num_local: int, num_columns: int, *, dtype: torch.dtype, device: torch.device, single: bool = False
    ) -> Tensor:
        """Zeroed memory for the rows of the local members, or of all members where memory is shared.

        With `single`, one row for the whole population instead, which belongs to the first member's process.
        """

    def first_row(self, num_local: int, device: torch.device) -> int:
        """The index of the first local member's row in what `allocate` returns."""
        return 0

    @abstractmethod
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
        """Do some work on columns of the rows of all processes. All that mixes members is made of this.

        Each column of a result depends on the same column of the members alone. So every process works on some whole
        blocks of columns, which do not depend on the number of processes; neither do the bits of the result.

        Args:
            parts: matrices of one dtype that `allocate` returned, or some of their columns: the rows of members first.
            work: what to do.
            changes: the parts that it changes in place. Where it changes none, the caller must synchronise.
            columns: which columns; None for all. Only these are read, sent and written.
            singles: the parts with a single row instead of one for each member.
            copies: the parts that every process has as a whole, which are written and not read.
            members: whose rows are read; None for all.
            chosen: the chosen columns of the local rows, if they were read already; may be changed.
            synchronised: all processes have synchronised since rows last changed, so no barrier is needed first.

        Returns:
            What the calls of `work` in this process returned.
        """

    def mix_(self, rows: Tensor, matrix: Tensor, *, synchronised: bool = False) -> None:
        """`rows <- matrix @ rows` over the members of all processes, each of which has a row in the matrix."""
        self.map_columns(
            [rows], lambda parts, _, width: mix_columns_(parts[0], matrix, width), synchronised=synchronised
        )

    def push_(self, rows: Tensor, keep: float, *, synchronised: bool = False) -> None:
        """`mix_` with the matrix of a push, in which each member keeps the share `keep` of itself."""
        self.map_columns(
            [rows], lambda parts, _, width: push_columns_(parts[0], keep, width), synchronised=synchronised
        )

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
        """Change columns of several matrices, block by block; arguments are as for `map_columns`.

        `update` gets the rows of all processes for a block of columns, and changes them in place.
        """
        self.map_columns(
            parts,
            lambda found, start, width: update_blocks_(found, update, width=width, start=start),
            changes=range(len(parts)),
            columns=columns,
            singles=singles,
            chosen=chosen,
            synchronised=synchronised,
        )

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """The weighted sum of all members' rows, in `out` or a new row; members of weight 0 are not read."""
        row = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device) if out is None else out
        used = {member: weight for member, weight in enumerate(weights.tolist()) if weight}
        self.map_columns(
            [rows, row.unsqueeze(0)],
            lambda parts, _, width: combine_columns_(parts[1][0], parts[0], used, width),
            changes=(1,),
            copies=(1,),
            members=list(used),
        )
        return row

    def squared_distances(self, rows: Tensor) -> Tensor:
        """The squared distance of every member of the population to the mean row, in float64.

        On the device of the rows if one process has all of them, otherwise on the CPU.
        """
        found = self.map_columns(
            [rows],
            lambda parts, start, width: (start, squared_distances_by_block(parts[0], width)),
            changes=(),
        )
        if not self.is_local:  # the parts are added in block order
            found = sorted(self.all_gather([(start, part.cpu()) for start, part in found]), key=lambda one: one[0])
        parts = torch.cat([part for _, part in found]) if len(found) > 1 else found[0][1]
        return parts[0] if len(parts) == 1 else parts.sum(dim=0)

    def broadcast_(self, columns: Tensor) -> None:
        """Copy the values of data rank 0 to all processes that train the same member."""
        return

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """The sum of `values` over the processes that hold shards of the same member."""
        return values

    @abstractmethod
    def all_gather(self, values: list[T]) -> list[T]:
        """The values of all processes in rank order, which is member order for one value per local member."""

    @abstractmethod
    def all_max(self, *values: float) -> tuple[float, ...]:
        """The maximum of each value over all processes; much cheaper than `all_gather`."""

    @abstractmethod
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
        found = (
            list(chosen or parts) if columns is None else list(chosen or [chosen_columns(p, columns) for p in parts])
        )
        num_rows = sum(len(part) for number, part in enumerate(parts) if number not in copies)
        done = work(found, 0, block_width(parts[0], num_rows, found[0].shape[1]))
        if columns is not None:
            for number in changes:
                write_columns_(parts[number], columns, found[number])
        return [done]

    def all_gather(self, values: list[T]) -> list[T]:
        return list(values)

    def all_max(self, *values: float) -> tuple[float, ...]:
        return values

    def barrier(self) -> None:
        pass


def as_group(group: Any) -> Group:
    """The group for any object that says where members are.

    Args:
        group: None when this process holds all members; a `Group`; a process group of `torch.distributed`, each rank of
            which holds its own members; or a device mesh with a dimension called `population` and at most one other,
            along which several ranks train one member.
    """
    if isinstance(group, Group):
        return group
    if group is not None:  # what needs torch.distributed is imported where it is used
        found: Group = importlib.import_module("papa.distributed.mesh").group_of(group)
        return found
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and num_ranks != "1" and not torch.distributed.is_initialized():
        # Before `init_process_group`, `dist.group.WORLD` is None too.
        raise ConfigError(
            f"group is None in one of {num_ranks} processes that torchrun started: call torch.distributed."
            "init_process_group() first and pass torch.distributed.group.WORLD, or pass papa.core.group.LocalGroup() "
            "for a population of this process alone"
        )
    return LocalGroup()


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
