"""Modules whose averaged tensors are the rows of matrices, one matrix per dtype: what a population is made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from papa.core import layout
from papa.core.binding import BoundMember, Places
from papa.core.columns import Columns, chosen_columns
from papa.core.group import Group
from papa.core.row_measures import is_finite, row_sums


class MemberRows:
    """The local members of a population, bound to their rows.

    `average` maps patterns over names to whether matching tensors are averaged.
    """

    def __init__(self, models: list[nn.Module], group: Group, average: Mapping[str, bool]) -> None:
        self._models = models
        self._average = dict(average)
        self.group = group
        self._bind()

    def _bind(self) -> None:
        for model in self._models:
            layout.reshard_(model)
        self._layout = layout.plan(self._models, self._average)
        cure = "all members of a population must share one architecture"
        self.group.check_same({slot.name: layout.describe(slot) for slot in self._layout.slots}, cure=cure)
        # With the same tensors in another order, columns would not correspond.
        self.group.check_same({f"tensor {n}": slot.name for n, slot in enumerate(self._layout.slots)}, cure=cure)
        self.matrices: dict[torch.dtype, Tensor] = {
            dtype: self.group.allocate(len(self), columns, dtype=dtype, device=self._layout.device)
            for dtype, columns in self._layout.num_columns.items()
        }
        starts = self._layout.num_parameter_columns
        self._parameter_rows = {dtype: rows[:, : starts[dtype]] for dtype, rows in self.matrices.items()}
        # Up to the last buffer: the padding differs between ranks with shards of different sizes.
        ends = {
            dtype: max(slot.offset + slot.numel for slot in self._layout.slots if slot.dtype == dtype)
            for dtype in starts
        }
        self._buffer_columns = {
            dtype: slice(start, ends[dtype]) for dtype, start in starts.items() if start < ends[dtype]
        }
        self._first_row = first = self.group.first_row(len(self), self._layout.device)
        self._bound = [
            BoundMember(
                model,
                self._layout,
                {dtype: rows[first + index] for dtype, rows in self.matrices.items()},
                self.members[index],
            )
            for index, model in enumerate(self._models)
        ]
        self._places = Places(self._bound)
        self._whole_tensors = [tensor for bound in self._bound for tensor in bound.whole_tensors]
        self._sharded_modules = [module for bound in self._bound for module in bound.sharded_modules]

    def __len__(self) -> int:
        """The number of local members."""
        return len(self._models)

    @property
    def size(self) -> int:
        """The number of members of the whole population, on all processes."""
        return self.group.size(len(self))

    @property
    def members(self) -> range:
        """The indices of the local members within the whole population."""
        return self.group.members(len(self))

    @property
    def matrix(self) -> Tensor:
        """The local rows in the dtype of most weights; `matrices` has all dtypes."""
        return self.matrices[self._layout.main_dtype]

    @property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        """The memory order of each averaged tensor in its row."""
        return tuple(slot.stride for slot in self._layout.slots)

    def refresh_(self) -> None:
        """Copy tensors that were moved out of the matrix back into it.

        `module.to(memory_format=...)`, `self.buffer = new` and the like move tensors silently, so every operation on
        the matrix calls this first. Raises a `MemberError` if copying back would hide a mistake, such as a replaced
        Parameter.
        """
        for module in self._sharded_modules:  # a forward pass under `fully_shard` left their parameters unsharded
            module.reshard()  # type: ignore[operator]
        if self._places.are_unchanged():
            return
        moved = [bound.new_strides() for bound in self._bound]
        if self.group.is_local and moved[0] and all(strides == moved[0] for strides in moved):
            self._bind()  # all members were converted to another memory order: the matrix follows
        for bound in self._bound:
            bound.refresh_()

    def mark_changed_(self) -> None:
        """Tell autograd and autocast that weights changed; call it after writing to the matrix yourself."""
        if self._is_sharded:
            for bound in self._bound:
                bound.write_back_()
        torch.autograd.graph.increment_version(self._whole_tensors)
        torch.clear_autocast_cache()

    def _settle_(self) -> None:
        """Refresh, and make buffers equal on ranks that train one member together."""
        self.refresh_()
        self._share_buffers_()

    def _share_buffers_(self) -> None:
        if self.group.is_local:
            return
        local = self._local_rows()
        for dtype, columns in self._buffer_columns.items():
            self.group.broadcast_(local[dtype][:, columns])

    def _local_rows(self) -> dict[torch.dtype, Tensor]:
        """The rows of the local members, by dtype, without refreshing them first."""
        first = self._first_row
        return {dtype: rows[first : first + len(self)] for dtype, rows in self.matrices.items()}

    def _chosen(self, columns: Mapping[torch.dtype, Columns]) -> dict[torch.dtype, Tensor]:
        """Some columns of the local rows; copies of lines."""
        local = self._local_rows()
        return {dtype: chosen_columns(local[dtype], chosen) for dtype, chosen in columns.items()}

    def _stacked(self) -> dict[str, Tensor]:
        """Each averaged tensor of all local members, by name: views `(len(self), *shape)` of the matrix.

        Writing to them writes to the members.
        """
        first = self.group.first_row(len(self), self._layout.device)
        return {
            slot.name: layout.stacked(self.matrices[slot.dtype][first : first + len(self)], slot)
            for slot in self._layout.slots
        }

    def _num_parameter_columns(self, dtype: torch.dtype) -> int:
        """The number of leading columns of a dtype that hold parameters; the others hold buffers."""
        return self._layout.num_parameter_columns[dtype]

    def _is_finite(self, index: int, *, chosen: Mapping[torch.dtype, Tensor] | None = None) -> bool:
        """Whether all averaged weights of a local member are finite, or the chosen ones; one pass over its row."""
        return all(is_finite(rows[index]) for rows in (chosen or self._local_rows()).values())

    def _row_sums(self, *, only_buffers: bool) -> list[Tensor]:
        """The sums of the local rows, by dtype: finite if all their numbers are, unless a sum overflows.

        With `only_buffers`, those of the averaged buffers alone, if the parameters are known to be finite.
        """
        if only_buffers and not self._buffer_columns:
            return []
        local = self._local_rows()
        if only_buffers:
            return [row_sums(local[dtype][:, columns]) for dtype, columns in self._buffer_columns.items()]
        return [row_sums(rows) for rows in local.values()]

    @property
    def _is_sharded(self) -> bool:
        """Whether members are under `fully_shard`, so that this process holds shards of them."""
        return self._bound[0].is_sharded
