"""What is measured of the rows of a matrix: distances to their mean, and whether they are finite."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from papa.core import kernels
from papa.core.product import accumulation_dtype, block_width, column_blocks, full_precision, weighted_sum
from papa.core.scratch import scratch

NO_REDUCTION = 0
"""The code of `reduction="none"` for losses of torch."""

squared_differences: Callable[..., Tensor] = torch._C._nn.mse_loss
"""What `torch.nn.functional.mse_loss` calls, which itself has neither `out` nor a mean of another shape."""


def squared_distances(rows: Tensor) -> Tensor:
    """The squared Euclidean distance of each row to the mean of all rows, in float64 on the device of the rows."""
    parts = squared_distances_by_block(rows, block_width(rows, *rows.shape))
    return parts[0] if len(parts) == 1 else parts.sum(dim=0)


def squared_distances_by_block(columns: Tensor, width: int) -> Tensor:
    """The contribution of each block of columns to `squared_distances`: `(blocks, p)`, in float64 on their device.

    A non-finite number in any row makes the contribution of its block non-finite, for every row.
    """
    if kernels.supports(columns.dtype, columns.device) and kernels.is_plain(columns):
        return kernels.squared_distances_by_block(columns, width)
    size, num_columns = columns.shape
    # One tensor for all parts: many small tensors that outlive the large ones would fragment the heap.
    dtype = accumulation_dtype(columns.dtype.to_real())
    parts = torch.empty(-(-num_columns // width), size, dtype=dtype, device=columns.device)
    with full_precision(columns.device):
        for part, block in zip(parts.unbind(), torch.split(columns, width, dim=1) if len(parts) else (), strict=True):
            _squares_in(block, out=part)
    return parts.double()


def _squares_in(block: Tensor, out: Tensor) -> Tensor:
    """The squared distance of each row to their mean, in the dtype in which numbers are added up."""
    real = torch.view_as_real(block).flatten(1) if block.is_complex() else block
    dtype = accumulation_dtype(real.dtype)
    squares = scratch.matrix(real, dtype)
    wide = real if real.dtype == dtype else squares.copy_(real)
    if len(wide) == 2:  # the mean is half-way between them: a third of the work
        between = squared_differences(wide[0], wide[1], NO_REDUCTION, out=squares[0]).sum()
        return torch.mul(between.expand(2), 0.25, out=out)
    mean = weighted_sum(_equal_weights(len(wide), dtype, wide.device), wide)
    squared_differences(wide, mean, NO_REDUCTION, out=squares)  # one pass
    return torch.sum(squares, 1, out=out)


@functools.lru_cache(maxsize=16)
def _equal_weights(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((size,), 1.0 / size, dtype=dtype, device=device)


def row_sums(rows: Tensor) -> Tensor:
    """The sum of each row, in float64. It is non-finite if a number of the row is, or if the sum overflows."""
    if kernels.supports(rows.dtype, rows.device) and kernels.is_plain(rows):
        return kernels.sums_by_block(rows, block_width(rows, *rows.shape)).sum(dim=0)
    if rows.element_size() < 4:  # adding up half-precision numbers directly takes five times as long
        wide = (scratch.matrix(block, torch.float32).copy_(block) for block in column_blocks(rows))
        return torch.stack([block.sum(dim=1) for block in wide]).double().sum(dim=0)
    sums = rows.sum(dim=1)
    return (sums.abs() if sums.is_complex() else sums).double()


def is_finite(row: Tensor) -> bool:
    """Whether all numbers of a row are finite.

    A non-finite number makes the sum non-finite, but so may overflow: only then is each number checked.
    """
    return bool(torch.isfinite(row.sum(dtype=accumulation_dtype(row.dtype)))) or bool(torch.isfinite(row).all())
