"""The product `W <- A W`, computed in place on one block of columns at a time.

`W` holds one member per row and has millions of columns; `A` has one row and one column per member. Each column of the
result depends on the same column of `W` alone, so a block of columns is read, multiplied and written back while it is
in cache, and different processes can multiply different columns with the same bits as one process would.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.core import kernels, mixing
from papa.core.layout import ALIGNMENT_BYTES
from papa.core.mixing import exact_in_float32

MAX_VIEWS = 64


class _Scratch(threading.local):
    """Memory for one block of columns, and for one row of a block, that is used again for every block.

    New memory for each block would have to be mapped by the system each time, which takes longer than to fill it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def matrix(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the shape of a block; valid until the next call."""
        return self._get("matrix", like.shape, dtype, like.device)

    def vector(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for one row of a block; valid until the next call."""
        return self._get("vector", like.shape[1:], dtype, like.device)

    def _get(self, use: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        found = self._views.get((dtype, shape))
        return self._new_view(use, shape, dtype) if found is None else found

    @torch.inference_mode(False)  # a tensor of inference mode could not be used outside of it
    def _new_view(self, use: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        memory = self._memory.get((use, dtype))
        if memory is None or len(memory) < shape.numel():
            memory = self._memory[use, dtype] = torch.empty(shape.numel(), dtype=dtype, device="cpu")
            self._views.clear()  # they may keep the smaller memory
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        view = self._views[dtype, shape] = memory[: shape.numel()].view(shape)
        return view


scratch = _Scratch()


BLOCK_BYTES_CPU = 1 << 20
"""The size of a block of columns: small enough for the cache."""

BLOCK_BYTES_ACCELERATOR = 1 << 26

UNIT = 2.0**-24
"""What weights of at most 1 are rounded to multiples of; see `exact_in_float32`."""

Product: TypeAlias = Callable[[Tensor], object]
"""Multiplies the rows in a block of columns by a matrix, in place."""


def mix_columns_(columns: Tensor, matrix: Tensor, width: int) -> None:
    """`columns <- matrix @ columns` for some columns of the rows of all members, a block of `width` at a time."""
    if columns.shape[1]:
        with full_precision(columns.device):
            _multiply_(columns, product_with(matrix, columns), width)


def push_columns_(columns: Tensor, keep: float, width: int) -> None:
    """`mix_columns_` with `mixing.push(p, keep)`, without looking at the matrix: its strength may change every time."""
    size, num_columns = columns.shape
    # The weights of `exact_in_float32(mixing.push(size, keep))`, in units: what a member takes of each, and of itself.
    units = round((1.0 - keep) * (1.0 / size) / UNIT)
    own_units = round((keep + (1.0 - keep) * (1.0 / size)) / UNIT)
    if columns.dtype.itemsize > 4 or size == 1 or not 0 <= units < own_units <= 1.0 / UNIT:
        mix_columns_(columns, mixing.push(size, keep), width)
        return
    own, common = 1.0 - size * units * UNIT, units * UNIT  # the matrix is own I + common 1 1^T
    if common == 0.0 or not num_columns:
        return  # every member keeps exactly its own bits
    if kernels.supports(columns.dtype, columns.device) and kernels.is_plain(columns):
        kernels.push_(columns, own)
        return
    with full_precision(columns.device):
        _multiply_(columns, _known_push(own, common, size, columns.dtype, columns.device), width)


@functools.lru_cache(maxsize=16)
def _known_push(own: float, common: float, size: int, dtype: torch.dtype, device: torch.device) -> Product:
    row = torch.full((size,), common, dtype=accumulation_dtype(dtype), device="cpu")
    return _push_product(own, row, dtype, device)


def _multiply_(columns: Tensor, mix_block_: Product, width: int) -> None:
    if isinstance(mix_block_, OnePassPush):
        mix_block_(columns)
        return
    for block in reversed(torch.split(columns, width, dim=1)):  # a check has read all, the last may still be in cache
        mix_block_(block)


def product_with(matrix: Tensor, like: Tensor, points: Tensor | None = None) -> Product:
    """A function that multiplies a block of columns by `matrix` in place; call it under `full_precision`.

    Args:
        matrix: float64.
        like: a tensor with the dtype and device of the blocks.
        points: which rows are points, as for `exact_in_float32`; None for all.
    """
    if points is not None:
        return _product_with(matrix, like.dtype, like.device, points)
    return _known_product(matrix.double().numpy().tobytes(), len(matrix), like.dtype, like.device)


@functools.lru_cache(maxsize=16)
def _known_product(matrix: bytes, size: int, dtype: torch.dtype, device: torch.device) -> Product:
    """`product_with` of a matrix given by its bytes: most rules use the same matrix many times."""
    weights = torch.frombuffer(bytearray(matrix), dtype=torch.float64).view(size, size)
    return _product_with(weights, dtype, device)


def _product_with(matrix: Tensor, dtype: torch.dtype, device: torch.device, points: Tensor | None = None) -> Product:
    """The fastest function that multiplies a block by `matrix` in place.

    Two forms of matrix are cheaper than a product and cover the paper's rules: `d I + 1 c^T` (push, merge all) is one
    weighted sum and one addition; rows with at most two weights (merge pairs) are one interpolation each. Members with
    weight zero are not read, since 0 x NaN is NaN.
    """
    wide_dtype = accumulation_dtype(dtype)
    weights = matrix if dtype in (torch.float64, torch.complex128) else exact_in_float32(matrix, points)
    if torch.equal(weights, torch.eye(len(weights), dtype=weights.dtype, device="cpu")):
        return lambda block: None  # every member keeps exactly its own bits
    own, common = _own_and_common(weights)
    is_copy = own == 0.0 and common is not None and int((common != 0).sum()) == 1
    if common is not None and not is_copy:
        return _push_product(own, common.to(dtype=wide_dtype), dtype, device)
    return _widened(_other_product(weights, wide_dtype, device), dtype)


def _widened(mix_wide_: Product, dtype: torch.dtype) -> Product:
    """A product for blocks of a dtype, computed in the dtype in which numbers are added up."""
    wide_dtype = accumulation_dtype(dtype)
    if dtype == wide_dtype:
        return mix_wide_

    def mix_block_(block: Tensor) -> None:
        wide = scratch.matrix(block, wide_dtype).copy_(block)
        mix_wide_(wide)
        block.copy_(wide)

    return mix_block_


BlockUpdate: TypeAlias = Callable[[list[Tensor], int], None]
"""Changes blocks of the same columns of several matrices in place; also given the position of the first column."""


def update_blocks_(parts: Sequence[Tensor], update: BlockUpdate, *, width: int, start: int = 0) -> None:
    """Apply an update to block after block of columns of several matrices.

    Args:
        parts: matrices with the same columns.
        update: what to do with each block.
        width: the number of columns in a block.
        start: the position of the first of these columns among all that are updated.
    """
    with full_precision(parts[0].device):
        for first in range(0, parts[0].shape[1], width):
            update([part[:, first : first + width] for part in parts], start + first)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers are added up: at least float32."""
    return dtype if dtype.itemsize >= 4 else torch.float32


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch off autocast and reduced matmul precision inside the block."""
    backend: Any = getattr({"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device.type), "matmul", None)
    # Since PyTorch 2.9 each backend has its own setting, and the one for all raises once these were used.
    is_new = hasattr(backend, "fp32_precision")
    precision = backend.fp32_precision if is_new else torch.get_float32_matmul_precision()
    is_full = precision in ("highest", "ieee", "none")
    is_autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    if is_full and not is_autocast:  # as usual; switching takes as long as a small push
        yield
        return
    with torch.autocast(device.type, enabled=False) if is_autocast else contextlib.nullcontext():
        try:
            if is_new:
                backend.fp32_precision = "ieee"
            elif not is_full:
                torch.set_float32_matmul_precision("highest")
            yield
        finally:
            if is_new:
                backend.fp32_precision = "none"  # the setting of all backends
                if backend.fp32_precision != precision:
                    backend.fp32_precision = precision
            elif not is_full:
                torch.set_float32_matmul_precision(precision)


def _other_product(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> Product:
    """The product with a matrix that is no push, for blocks in the dtype in which numbers are added up."""
    if int((matrix != 0).sum(dim=1).max()) <= 2:
        parents = []  # the members that a row is made of, and the weight of the second
        for row in matrix.tolist():
            first, *rest = [member for member, weight in enumerate(row) if weight]
            parents.append((first, rest[0], row[rest[0]]) if rest else (first, first, 0.0))
        order = _least_copies(parents)
        return lambda block: _interpolate_(block, parents, order)
    weights = matrix.to(device=device, dtype=dtype)
    if bool(matrix.all()):
        return lambda block: block.copy_(weights @ block)
    # A member that keeps only itself is not written: times 1, -0.0 would become 0.0.
    stays = (matrix == torch.eye(len(matrix), dtype=matrix.dtype, device="cpu")).all(dim=1).tolist()
    used_by = [_used(row) for row in matrix]
    sums = [(child, used_by[child], row[used_by[child]]) for child, row in enumerate(weights) if not stays[child]]

    def mix_block_(block: Tensor) -> None:
        children = [row @ block[used] for _, used, row in sums]
        for (child, _, _), values in zip(sums, children, strict=True):
            block[child].copy_(values)

    return mix_block_


@dataclass(frozen=True)
class OnePassPush:
    """The product with `d I + 1 c^T`, where `d` is `own` and `c` is `common`, for all columns in one pass."""

    own: float
    common: Tensor | None
    """None if all its numbers are equal and sum to `1 - own`."""

    def __call__(self, block: Tensor) -> None:
        """Multiply the rows in place."""
        if not kernels.is_plain(block):
            raise ValueError(f"a {type(block).__name__} with strides {block.stride()}, expected rows in memory")
        kernels.push_(block, self.own, self.common)


def _push_product(own: float, common: Tensor, dtype: torch.dtype, device: torch.device) -> Product:
    """The product with `d I + 1 c^T`, where `d` is `own` and `c` is `common`, on the CPU.

    Everything that depends on numbers is decided before they are on the device, which is then never waited for.
    """
    if kernels.supports(dtype, device):
        is_mean = bool((common == common[0]).all()) and float(common[0]) * len(common) == 1.0 - own
        return OnePassPush(own, None if is_mean else common)
    used = _used(common)
    if bool((common == common[0]).all()):  # made there, since a copy from the host may be waited for
        row = torch.full((len(common),), common[0].item(), dtype=common.dtype, device=device)
    else:
        row = common[used].to(device)
    if own == 0.0:
        return _widened(lambda block: block.copy_(row @ block[used]), dtype)
    if isinstance(used, slice) and not row.is_complex():
        return _widened(lambda block: torch.add(weighted_sum(row, block), block, alpha=own, out=block), dtype)
    return _widened(lambda block: torch.add(row @ block[used], block, alpha=own, out=block), dtype)


def weighted_sum(row: Tensor, block: Tensor) -> Tensor:
    """`row @ block` of real numbers, in memory that the next call uses again."""
    return torch.mv(block.t(), row, out=scratch.vector(block, row.dtype))


def _used(row: Tensor) -> slice | list[int]:
    """The members with a non-zero weight: a slice if these are all (indexing with it copies nothing), else a list.

    Asked of weights on the CPU only: the answer is needed to launch anything, and a device would be waited for.
    """
    return slice(None) if bool(row.all()) else row.nonzero().flatten().tolist()


def _interpolate_(block: Tensor, parents: list[tuple[int, int, float]], order: list[tuple[int, bool]]) -> None:
    """Write each child over the member with its index, in an order that needs few copies of members."""
    rows = block.unbind()
    before = list(rows)
    for child, is_needed in order:
        first, second, share = parents[child]
        if is_needed:
            before[child] = rows[child].clone()
        if first != second:
            torch.lerp(before[first], before[second], share, out=rows[child])
        elif first != child:
            rows[child].copy_(before[first])


def _least_copies(parents: list[tuple[int, int, float]]) -> list[tuple[int, bool]]:
    """The order in which to write children, and whether the member that each replaces must be copied first.

    Members that are no parent of a remaining child are replaced first. If there is none, the parent of the most
    remaining children is next, since one copy serves them all.
    """
    others = [{first, second} - {child} for child, (first, second, _) in enumerate(parents)]
    needs = Counter(parent for of_one in others for parent in of_one)
    left, order = list(range(len(parents))), []
    while left:
        chosen = min(left, key=lambda child: (needs[child] > 0, -needs[child]))
        order.append((chosen, needs[chosen] > 0))
        left.remove(chosen)
        needs.subtract(others[chosen])
    return order


def _own_and_common(matrix: Tensor) -> tuple[float, Tensor | None]:
    """`d` and `c` such that the matrix equals `d I + 1 c^T`; `c` is None if the matrix has another form.

    A diagonal on which `d` and `c` cancel counts as another form, since 0 x NaN is not 0.
    """
    size = len(matrix)
    columns = torch.arange(size, device="cpu")
    common = matrix[(columns + 1) % size, columns] if size > 1 else matrix[0] * 0
    own = float(matrix[0, 0] - common[0])
    rebuilt = own * torch.eye(size, dtype=matrix.dtype, device="cpu") + common
    cancels = bool(((rebuilt.diagonal() == 0) & (common != 0)).any())
    return (own, common) if torch.equal(rebuilt, matrix) and not cancels else (own, None)


def combine_columns_(target: Tensor, rows: Tensor, weights: Mapping[int, float], width: int) -> None:
    """`target <- sum of weights[j] rows[j]`, adding members in order; others are not read, since 0 x NaN is NaN."""
    for start in range(0, len(target), width):
        columns = slice(start, start + width)
        combine_block_(target[columns], [(rows[member, columns], weight) for member, weight in weights.items()])


def combine_block_(target: Tensor, weighted: Iterable[tuple[Tensor, float]]) -> None:
    """Set `target` to the weighted sum of columns of several rows, added in the given order."""
    total = torch.zeros_like(target, dtype=accumulation_dtype(target.dtype))
    for columns, weight in weighted:
        total.add_(columns, alpha=weight)
    target.copy_(total)


def column_blocks(rows: Tensor, num_rows: int | None = None) -> Iterator[Tensor]:
    """Split a matrix into blocks of columns; the boundaries depend on its dtype, device type and shape alone.

    Args:
        rows: the matrix.
        num_rows: split as a matrix with this number of rows would be; `len(rows)` when None.
    """
    width = block_width(rows, num_rows or len(rows), rows.shape[1])
    if width >= rows.shape[1]:
        yield rows
    else:
        yield from torch.split(rows, width, dim=1)


def block_width(like: Tensor, num_rows: int, num_columns: int) -> int:
    """The number of columns in a block of a matrix of this shape, with the dtype and device of `like`.

    All blocks but the last have this width. It may be an eighth above the limit, so that no small block is left over.
    """
    limit = BLOCK_BYTES_CPU if like.device.type == "cpu" else BLOCK_BYTES_ACCELERATOR
    return _block_width(num_rows, num_columns, like.element_size(), limit)


@functools.lru_cache(maxsize=64)
def _block_width(num_rows: int, num_columns: int, element_size: int, limit: int) -> int:
    step = ALIGNMENT_BYTES // element_size
    widest = max(step, limit // (num_rows * element_size) // step * step)
    num_blocks = max(1, -(-num_columns * 8 // (widest * 9)))
    return -(-num_columns // (num_blocks * step)) * step or step


NO_REDUCTION = 0
"""The code of `reduction="none"` for losses of torch."""

squared_differences: Callable[..., Tensor] = torch._C._nn.mse_loss
"""What `torch.nn.functional.mse_loss` calls, which itself has neither `out` nor a mean of another shape."""


def squared_distances_by_block(columns: Tensor, width: int) -> Tensor:
    """The contribution of each block to the squared Euclidean distances of all rows to their mean.

    The result is `(blocks, rows)`, in float64 on the device of the rows. A non-finite number in any row makes the
    contribution of its block non-finite, for every row.
    """
    if kernels.supports(columns.dtype, columns.device) and kernels.is_plain(columns):
        return kernels.measured("squared_distances", columns, width)
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
        return kernels.measured("sums", rows, block_width(rows, *rows.shape)).sum(dim=0)
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
