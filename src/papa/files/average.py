"""Averaging checkpoints a block at a time: memory holds a few blocks, however large and many the files are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from papa.errors import SoupError
from papa.files.header import TensorInfo
from papa.files.sources import Checkpoint

BLOCK = 1 << 18
"""How many numbers are averaged at a time: what they need stays in the processor's cache."""
MOST_DIFFERENCES = 10
"""How many differences between checkpoints a message lists."""


def is_averaged(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype are averaged; counters and masks of whole numbers are not."""
    return dtype.is_floating_point or dtype.is_complex


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of a dtype are averaged: float32 or better."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def differences(first: Mapping[str, TensorInfo], other: Mapping[str, TensorInfo]) -> list[str]:
    """In what a checkpoint differs from the first so that the two cannot be averaged; dtypes may."""
    found = [f"no '{name}' {first[name]}" for name in first if name not in other]
    found += [f"an extra '{name}' {other[name]}" for name in other if name not in first]
    for name in first:
        if name in other and not _fit(first[name], other[name]):
            found.append(f"'{name}' {other[name]} instead of {first[name]}")
    return found


def _fit(one: TensorInfo, other: TensorInfo) -> bool:
    kinds = [(is_averaged(info.dtype), info.dtype.is_complex) for info in (one, other)]
    return one.shape == other.shape and kinds[0] == kinds[1]


def check_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise a `SoupError` that lists the first differences unless all have the same names and shapes."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        found = differences(first.tensors, other.tensors)
        if found:
            lines = "\n".join(f"  {difference}" for difference in found[:MOST_DIFFERENCES])
            more = f"\n  and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
            raise SoupError(
                f"{other.path} cannot be averaged with {first.path}, a soup needs networks of one architecture; "
                f"it has\n{lines}{more}"
            )


def output_tensors(checkpoints: Sequence[Checkpoint], dtype: torch.dtype | None) -> dict[str, TensorInfo]:
    """What the average will hold: the first checkpoint's tensors, floating-point ones in `dtype` when given."""
    return {
        name: TensorInfo(dtype, info.shape) if dtype is not None and info.dtype.is_floating_point else info
        for name, info in checkpoints[0].tensors.items()
    }


class Scratch:
    """Memory for a block that is reused for every block."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def get(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for `count` numbers; what was in it before is lost."""
        if self._memory.numel() < count * dtype.itemsize:
            self._memory = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return self._memory[: count * dtype.itemsize].view(dtype)


class Mean:
    """The weighted mean of checkpoints, tensor by tensor and block by block.

    Args:
        checkpoints: of one architecture.
        row: one weight for each, summing to 1. A weight of 0 leaves a checkpoint out, whatever is in it.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], row: Sequence[float]) -> None:
        self._used = [(one, weight) for one, weight in zip(checkpoints, row, strict=True) if weight]
        self._total, self._piece, self._raw, self._narrow = Scratch(), Scratch(), Scratch(), Scratch()

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The mean of one tensor in the dtype it was averaged in; what is not averaged comes from the first."""
        info = self._used[0][0].tensors[name]
        used = self._used if is_averaged(info.dtype) else [(self._used[0][0], 1.0)]
        dtype = reduce(torch.promote_types, [wide(checkpoint.tensors[name].dtype) for checkpoint, _ in used])
        for start in range(0, info.numel, BLOCK):
            count = min(BLOCK, info.numel - start)
            total = self._total.get(count, dtype)
            self._read(used[0][0], name, start, total)
            if used[0][1] != 1.0:
                total.mul_(used[0][1])
            for checkpoint, weight in used[1:]:
                piece = self._piece.get(count, dtype)
                self._read(checkpoint, name, start, piece)
                total.add_(piece, alpha=weight)
            if len(used) > 1 and _has_nan(total):
                raise SoupError(f"'{name}' of the mean has NaN: {self._with_nan(used, name, start, count)}")
            yield total

    def _with_nan(self, used: Sequence[tuple[Checkpoint, float]], name: str, start: int, count: int) -> str:
        """Which checkpoint it comes from."""
        for checkpoint, _ in used:
            piece = self._piece.get(count, wide(checkpoint.tensors[name].dtype))
            self._read(checkpoint, name, start, piece)
            if _has_nan(piece):
                return f"leave {checkpoint.path} out, which has it there"
        return "infinite numbers of opposite signs meet there"

    def blocks_as(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """The same, stored in another dtype; numbers that it cannot hold are a `SoupError`."""
        for block in self.blocks(name):
            if block.dtype == dtype:
                yield block
                continue
            narrow = self._narrow.get(block.numel(), dtype)
            narrow.copy_(block)
            if _overflowed(block, narrow):
                raise SoupError(f"'{name}' has numbers that {dtype} cannot hold: choose a wider --dtype")
            yield narrow

    def _read(self, checkpoint: Checkpoint, name: str, start: int, target: Tensor) -> None:
        dtype = checkpoint.tensors[name].dtype
        if dtype == target.dtype:
            checkpoint.read_into(name, start, target)
        else:
            raw = self._raw.get(target.numel(), dtype)
            checkpoint.read_into(name, start, raw)
            target.copy_(raw)


def _has_nan(block: Tensor) -> bool:
    """Whether a block has NaN: if so its sum is NaN too, which is found in a fraction of the time."""
    return bool(torch.isnan(block.sum())) and bool(torch.isnan(block).any())


def _overflowed(block: Tensor, narrow: Tensor) -> bool:
    if not block.is_floating_point() or narrow.dtype.itemsize >= block.dtype.itemsize:
        return False
    # Of the narrow dtypes not all know infinity or `isfinite`, so both are asked in float32.
    return bool(torch.isfinite(block).all()) and not bool(torch.isfinite(narrow.to(torch.float32)).all())
