"""The group of processes on any number of machines: each holds only the rows of its members.

What needs the weights of several members is computed on columns (`papa.distributed.exchange`), with the bits of a
single process. Pushes and merges of all members can use sums over processes instead, which is faster.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from papa.core import mixing
from papa.core.group import Work, zeros
from papa.core.product import Columns, chosen_columns, write_columns_
from papa.distributed.collectives import (
    MultiProcessGroup,
    all_gather_object,
    all_max,
    backend_for,
    check_current_device,
    connection_errors,
    has_nccl,
    own_groups,
    place_of,
)
from papa.distributed.exchange import ColumnExchange
from papa.errors import ConfigError, MemberError, did_you_mean

T = TypeVar("T")

EXCHANGES = {
    "exact": "columns of all rows by all-to-all, with the bits of a single process",
    "fast": "the mean row by a float32 all-reduce, with last bits that depend on the number of processes",
}


class DistributedGroup(MultiProcessGroup):
    """The processes that hold a population, each its own members.

    Args:
        group: the processes, with one or more members on each; None for all of `torch.distributed`.
        exchange: `exact` or `fast`; see `EXCHANGES`.
        data_group: the processes that train the same member as this one, where there are several; where they differ
            (BatchNorm statistics), rank 0 of this group counts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        exchange: str = "exact",
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        if exchange not in EXCHANGES:
            raise ConfigError(f"exchange is {exchange}: {did_you_mean(exchange, EXCHANGES)}")
        if group is None and not dist.is_initialized():
            raise ConfigError(
                "torch.distributed has no process group: call torch.distributed.init_process_group() first, under "
                "torchrun for instance"
            )
        super().__init__(group)
        self.exchange = exchange
        self.data_group = data_group
        self.is_first_of_member = data_group is None or data_group.rank() == 0
        self.is_leader = self.is_leader and self.is_first_of_member
        self._columns: ColumnExchange | None = None
        self._backend: str | None = None
        """What tensors on GPUs travel by, once rows were allocated."""

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.rank))

    @property
    def bytes_sent(self) -> int:
        return 0 if self._columns is None else self._columns.bytes_sent

    def local_range(self, size: int) -> range:
        if self.num_ranks > size:
            raise ConfigError(
                f"there are {self.num_ranks} ranks for {size} members: start at most one for each, or let several "
                "train one member, in your own script with a device mesh (population, data)"
            )
        return super().local_range(size)

    def members(self, num_local: int) -> range:
        return self._connect(num_local).members[self.rank]

    def size(self, num_local: int) -> int:
        return self._connect(num_local).size

    def _connect(self, num_local: int) -> ColumnExchange:
        """The exchange, once all ranks have sent each other the number of their members."""
        if self._columns is None:
            self.check_same({"exchange": self.exchange}, cure="give every process the same")
            self._columns = ColumnExchange(self.process_group, all_gather_object(num_local, self.process_group))
        if self._columns.counts[self.rank] != num_local:
            raise MemberError(
                f"this group holds a population with {self._columns.counts[self.rank]} members on rank {self.rank}, "
                f"got {num_local}: make a group for each population"
            )
        return self._columns

    def allocate(
        self, num_local: int, num_columns: int, *, dtype: torch.dtype, device: torch.device, single: bool = False
    ) -> Tensor:
        self._connect(num_local)
        self._choose_backend(device)
        if single:
            num_local = int(self.rank == 0)
        return zeros(num_local, num_columns, dtype=dtype, device=device)

    def _choose_backend(self, device: torch.device) -> None:
        """Let tensors on GPUs travel from GPU to GPU where each process has its own; else through the hosts."""
        own = own_groups.get(self.process_group) if self.process_group is not None else None
        if self._backend is None:
            if own is not None:
                self._backend = backend_for(all_gather_object(place_of(device), self.process_group))
                if torch.cuda.is_available():
                    own.register(self._backend)
            else:
                self._backend = (
                    "nccl" if has_nccl() and "nccl" in dist.get_backend_config(self.process_group) else "gloo"
                )
        if self._backend == "nccl":
            check_current_device(device, torch.cuda.current_device())

    def broadcast_(self, columns: Tensor) -> None:
        if self.data_group is not None and columns.numel():
            values = columns.contiguous()
            with connection_errors("sending buffers"):
                source = dist.get_global_rank(self.data_group, 0)
                dist.broadcast(values.view(-1).view(torch.uint8), source, group=self.data_group)
            columns.copy_(values)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Added in rank order, so that all processes have the same bits."""
        if self.data_group is None:
            return values
        return torch.stack(all_gather_object(values, self.data_group)).sum(dim=0)

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
        """Columns of all rows travel to the process that works on them, and back."""
        found = list(chosen or [chosen_columns(rows, columns) for rows in parts])
        exchange = self._connect(len(parts[0]))
        done = exchange.map_columns(found, work, changes=changes, singles=singles, copies=copies, members=members)
        for number in changes:
            write_columns_(parts[number], columns, found[number])
        return done

    def mix_(self, rows: Tensor, matrix: Tensor, *, synchronised: bool = False) -> None:
        keep = mixing.push_strength(matrix) if self.exchange == "fast" else None
        if keep is None:
            super().mix_(rows, matrix, synchronised=synchronised)
        else:
            self.push_(rows, keep)

    def push_(self, rows: Tensor, keep: float, *, synchronised: bool = False) -> None:
        if self.exchange == "fast" and not rows.is_complex():
            self._connect(len(rows)).push_by_sums_(rows, keep)
        else:
            super().push_(rows, keep, synchronised=synchronised)

    def all_max(self, *values: float) -> tuple[float, ...]:
        """Also over the processes that train the same member."""
        found = super().all_max(*values)
        return found if self.data_group is None else all_max(found, self.data_group)
