"""Multiplying a matrix of many columns from the left by a small one, a block of columns at a time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from papa.mixing import exact_in_float32

BLOCK_BYTES_CPU = 3 << 19
"""How much of the matrix is mixed at once: a block that is read, multiplied and written back stays in cache."""

BLOCK_BYTES_ACCELERATOR = 1 << 26

ALIGNMENT_BYTES = 64
"""Blocks begin on cache lines, as rows do."""


def mix_rows_(rows: Tensor, matrix: Tensor) -> None:
    """`rows <- matrix @ rows`, a block of columns at a time, so that each block is read and written once.

    Args:
        rows: the matrix of all members, `(p, columns)`.
        matrix: `(p, p)` in float64, row-stochastic.
    """
    mix_blocks_(column_blocks(rows), matrix)


def mix_blocks_(blocks: Iterable[Tensor], matrix: Tensor) -> None:
    """`block <- matrix @ block` for some blocks of columns of one matrix."""
    views = list(blocks)
    if not views:
        return
    dtype, device = views[0].dtype, views[0].device
    wide_dtype = dtype if dtype.itemsize >= 4 else torch.float32
    weights = matrix if wide_dtype in (torch.float64, torch.complex128) else exact_in_float32(matrix)
    if torch.equal(weights, weights.diagonal().diag()):
        return  # every member keeps itself alone, down to the last bit
    with full_precision(device):
        mix_block_ = _cheapest_product(weights, wide_dtype, device)
        for block in views:
            if dtype == wide_dtype:
                mix_block_(block)
            else:
                wide = block.to(wide_dtype)
                mix_block_(wide)
                block.copy_(wide)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products as precisely as their dtype says, whatever autocast or the matmul precision allow."""
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        try:
            if precision != "highest":
                torch.set_float32_matmul_precision("highest")
            yield
        finally:
            if precision != "highest":
                torch.set_float32_matmul_precision(precision)


def _cheapest_product(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], object]:
    """How to multiply a block by `matrix` in place.

    Two shapes of matrix are cheaper than a product and cover the paper's rules: `d I + 1 c^T` (a push, a merge of all)
    is one weighted sum and one addition; rows with at most two weights (a merge of pairs) are one interpolation each.
    Members of weight zero are left out by index, since 0 x NaN is NaN.
    """
    own, common = _own_and_common(matrix)
    if common is not None:
        used = _used(common)
        row = common[used].to(device=device, dtype=dtype)
        if own == 0.0:
            return lambda block: block.copy_(row @ block[used])
        return lambda block: torch.add(row @ block[used], block, alpha=own, out=block)
    if int((matrix != 0).sum(dim=1).max()) <= 2:
        parents = [_two_parents(row) for row in matrix.tolist()]
        order = _least_copies(parents)
        return lambda block: _interpolate_(block, parents, order)
    weights = matrix.to(device=device, dtype=dtype)
    if bool(weights.all()):
        return lambda block: block.copy_(weights @ block)
    sums = [(used, row[used]) for used, row in ((_used(row), row) for row in weights)]
    return lambda block: block.copy_(torch.stack([row @ block[used] for used, row in sums]))


def _used(row: Tensor) -> slice | list[int]:
    """The members with a weight: all of them as a slice, which copies nothing, or else their indices."""
    return slice(None) if bool(row.all()) else row.nonzero().flatten().tolist()


def _interpolate_(block: Tensor, parents: list[tuple[int, int, float]], order: list[tuple[int, bool]]) -> None:
    """Every child over the member of its number, in an order in which few have to be copied before they are lost."""
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
    """The children in the order to write them, and whether the member each replaces is still a parent of others.

    One whom no other child needs goes first; where there is none, the one whom most need, since it is copied once.
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
    """`d` and `c` such that the matrix is `d I + 1 c^T`; `c` is None when there are none.

    There are none either where `d` and `c` would cancel: 0 x NaN is not 0.
    """
    size = len(matrix)
    columns = torch.arange(size, device="cpu")
    common = matrix[(columns + 1) % size, columns] if size > 1 else matrix[0] * 0
    own = float(matrix[0, 0] - common[0])
    rebuilt = own * torch.eye(size, dtype=matrix.dtype, device="cpu") + common
    cancels = bool(((rebuilt.diagonal() == 0) & (common != 0)).any())
    return (own, common) if torch.equal(rebuilt, matrix) and not cancels else (own, None)


def _two_parents(row: list[float]) -> tuple[int, int, float]:
    """The two members of a row with at most two weights, and the weight of the second."""
    first, *rest = [member for member, weight in enumerate(row) if weight]
    second = rest[0] if rest else first
    return first, second, row[second] if rest else 0.0


def combine_rows(rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """`weights @ rows` as a row, members added in their order; those of weight 0 are not read: 0 x NaN is NaN."""
    used = [(member, weight) for member, weight in enumerate(weights.tolist()) if weight]
    combined = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device) if out is None else out
    for block, target in zip(column_blocks(rows), column_blocks(combined[None], num_rows=len(rows)), strict=True):
        combine_block_(target[0], [(block[member], weight) for member, weight in used])
    return combined


def combine_block_(target: Tensor, weighted: Iterable[tuple[Tensor, float]]) -> None:
    """`target` becomes the sum of some rows' columns, each times its weight, added in the order they come."""
    total = torch.zeros_like(target, dtype=target.dtype if target.element_size() >= 4 else torch.float32)
    for columns, weight in weighted:
        total.add_(columns, alpha=weight)
    target.copy_(total)


def squared_distances(rows: Tensor) -> Tensor:
    """The squared Euclidean distance of each row to the mean row, in float64 on the CPU."""
    return squared_distances_by_block(column_blocks(rows)).sum(dim=0)


def squared_distances_by_block(blocks: Iterable[Tensor]) -> Tensor:
    """The part that each block of columns has in the squared distances: `(blocks, p)`, in float64 on the CPU."""
    views = list(blocks)
    if not views:
        return torch.zeros(0)
    # One tensor for all parts: small ones that stay between large ones that go would keep the heap from being reused.
    parts = torch.empty(len(views), len(views[0]), dtype=torch.float64, device=views[0].device)
    for part, block in zip(parts.unbind(), views, strict=True):
        wide = block if block.element_size() >= 4 else block.float()
        part.copy_(torch.linalg.vector_norm(wide - wide.mean(dim=0), dim=1).double().square())
    return parts.cpu()


def is_finite(row: Tensor) -> bool:
    """Whether all numbers of a row are finite.

    One that is not makes the sum not finite; only when the sum is not, which may also be too large, is each looked at.
    """
    wide = row.dtype if row.element_size() >= 4 else torch.float32
    return bool(torch.isfinite(row.sum(dtype=wide))) or bool(torch.isfinite(row).all())


def column_blocks(rows: Tensor, num_rows: int | None = None) -> Iterator[Tensor]:
    """The matrix in blocks of columns; boundaries depend on its shape and dtype only, never on who asks.

    Args:
        rows: the matrix.
        num_rows: take the boundaries of a matrix with so many rows instead.
    """
    yield from torch.split(rows, block_width(rows, num_rows or len(rows)), dim=1)


def block_width(like: Tensor, num_rows: int) -> int:
    """The columns of a block of a matrix with so many rows, of the dtype and on the device of `like`."""
    limit = BLOCK_BYTES_CPU if like.device.type == "cpu" else BLOCK_BYTES_ACCELERATOR
    step = ALIGNMENT_BYTES // like.element_size()
    return max(step, limit // (num_rows * like.element_size()) // step * step)
