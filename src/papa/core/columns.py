"""Some columns of a matrix: how they are named, read and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of `width` neighbouring columns: line `n` has the columns from `n * width` on.

    Memory is read and written in lines of 64 bytes, so 16 neighbours in float32 cost no more than one of them. `len` is
    the number of columns.
    """

    numbers: Tensor
    """Sorted and distinct, in int64, on the device of the matrix."""
    width: int = 1

    def __len__(self) -> int:
        return len(self.numbers) * self.width

    @property
    def indices(self) -> Tensor:
        """The columns, one by one."""
        within = torch.arange(self.width, device=self.numbers.device)
        return torch.add(within, self.numbers.unsqueeze(1), alpha=self.width).flatten()

    def part(self, start: int, stop: int) -> Lines:
        """Those from one position to another among these columns, where lines begin and end."""
        return Lines(self.numbers[start // self.width : stop // self.width], self.width)

    def to(self, device: torch.device) -> Lines:
        """The same on a device."""
        return Lines(self.numbers.to(device), self.width)

    def of(self, rows: Tensor) -> list[Tensor]:
        """Each row of a matrix with one line in each index."""
        return list(rows if self.width == 1 else rows.view(len(rows), rows.shape[1] // self.width, self.width))


Columns: TypeAlias = Lines | slice | None
"""Some columns of a matrix: lines, a slice, or None for all."""


def chosen_columns(rows: Tensor, columns: Columns) -> Tensor:
    """Some columns of a matrix: a copy of lines, or a view."""
    if columns is None:
        return rows
    if isinstance(columns, slice):
        return rows[:, columns]
    found = torch.empty(len(rows), len(columns), dtype=rows.dtype, device=rows.device)
    for row, target in zip(columns.of(rows), columns.of(found), strict=True):
        torch.index_select(row, 0, columns.numbers, out=target)
    return found


def write_columns_(rows: Tensor, columns: Columns, values: Tensor) -> None:
    """Write back what `chosen_columns` returned."""
    if not isinstance(columns, Lines):
        return
    pairs = list(zip(columns.of(rows), columns.of(values), strict=True))
    for row, written in reversed(pairs):  # the last row that was read is most likely in the cache
        if columns.width == 1:
            row.scatter_(0, columns.numbers, written)  # faster than `index_copy_`
        else:
            row.index_copy_(0, columns.numbers, written)
