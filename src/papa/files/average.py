"""Averaging weights block by block: memory holds a few blocks, however large and many the files are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from papa.core.soups import stock_ratio
from papa.errors import SoupError
from papa.files.weights import WeightsFile
from papa.storage.tensors import TensorInfo

BLOCK = 1 << 18
"""The number of elements that are averaged at a time: they fit into the processor's cache."""
MAX_DIFFERENCES = 10
"""The number of differences that a message lists."""


def is_averaged(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype are averaged; integers and booleans, such as counters and masks, are not."""
    return dtype.is_floating_point or dtype.is_complex


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of a dtype are averaged: float32 or wider."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def differences(first: Mapping[str, TensorInfo], other: Mapping[str, TensorInfo]) -> list[str]:
    """Why two sets of weights cannot be averaged; dtypes may differ."""
    found = [f"no '{name}' {first[name]}" for name in first if name not in other]
    found += [f"an extra '{name}' {other[name]}" for name in other if name not in first]
    for name in first:
        if name in other and not _fit(first[name], other[name]):
            found.append(f"'{name}' {other[name]} instead of {first[name]}")
    return found


def _fit(one: TensorInfo, other: TensorInfo) -> bool:
    kinds = [(is_averaged(info.dtype), info.dtype.is_complex) for info in (one, other)]
    return one.shape == other.shape and kinds[0] == kinds[1]


def raise_differences(subject: str, found: Sequence[str]) -> None:
    """Raise a `SoupError` that lists the first differences, if there are any."""
    if found:
        lines = "\n".join(f"  {difference}" for difference in found[:MAX_DIFFERENCES])
        more = f"\n  and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
        raise SoupError(f"{subject}; it has\n{lines}{more}")


def check_same_architecture(files: Sequence[WeightsFile]) -> None:
    """Raise a `SoupError` unless all files have the same names and shapes."""
    for other in files[1:]:
        subject = f"{other.path} cannot be averaged with {files[0].path}, a soup needs networks of one architecture"
        raise_differences(subject, differences(files[0].tensors, other.tensors))


def output_tensors(files: Sequence[WeightsFile], dtype: torch.dtype | None) -> dict[str, TensorInfo]:
    """The tensors of an average: those of the first file, floating-point ones in `dtype` if it is given."""
    return {
        name: TensorInfo(dtype, info.shape) if dtype is not None and info.dtype.is_floating_point else info
        for name, info in files[0].tensors.items()
    }


class WeightedAverage:
    """The weighted average of files, tensor by tensor and block by block. A file with weight 0 is not read."""

    def __init__(self, files: Sequence[WeightsFile], weights: Sequence[float]) -> None:
        self._used = [(file, weight) for file, weight in zip(files, weights, strict=True) if weight]

    def blocks(self, name: str) -> Iterator[Tensor]:
        """One tensor's average in the dtype of the computation; what is not averaged comes from the first file."""
        info = self._used[0][0].tensors[name]
        used = self._used if is_averaged(info.dtype) else [(self._used[0][0], 1.0)]
        dtype = reduce(torch.promote_types, [wide(file.tensors[name].dtype) for file, _ in used])
        for start in range(0, info.numel, BLOCK):
            stop = min(start + BLOCK, info.numel)
            first, weight = used[0]
            total = first.part(name, start, stop).to(dtype)
            if weight != 1.0:
                total = total * weight
            for file, weight in used[1:]:
                total = total.add(file.part(name, start, stop).to(dtype), alpha=weight)
            if len(used) > 1 and has_nan(total):
                raise nan_error([file for file, _ in used], name, start, stop)
            yield total

    def blocks_as(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """The same in another dtype; a `SoupError` for numbers that it cannot hold."""
        for block in self.blocks(name):
            stored = block.to(dtype)
            if _overflowed(block, stored):
                raise SoupError(f"'{name}' has numbers that {dtype} cannot hold: choose a wider dtype")
            yield stored


class StockAverage(WeightedAverage):
    """Model Stock: the mean of files, moved back toward the base tensor by tensor (`papa.model_stock`)."""

    def __init__(self, files: Sequence[WeightsFile], base: WeightsFile) -> None:
        self._files, self._base = list(files), base

    def blocks(self, name: str) -> Iterator[Tensor]:
        """One tensor's average; its share of the mean comes from a first pass over it."""
        info, count = self._base.tensors[name], len(self._files)
        ratio = stock_ratio(self._products(name)) if is_averaged(info.dtype) else 1.0
        weights = [ratio / count] * count + [1.0 - ratio]
        yield from WeightedAverage([*self._files, self._base], weights).blocks(name)

    def _products(self, name: str) -> Tensor:
        """The inner products of all pairs of the files' differences from the base, in float64."""
        total = torch.zeros(len(self._files), len(self._files), dtype=torch.float64)
        for start in range(0, self._base.tensors[name].numel, BLOCK):
            stop = min(start + BLOCK, self._base.tensors[name].numel)
            rows = torch.stack([file.part(name, start, stop).to(torch.float64) for file in self._files])
            rows -= self._base.part(name, start, stop).to(torch.float64)
            total += rows @ rows.T
        return total


def nan_error(files: Sequence[WeightsFile], name: str, start: int, stop: int) -> SoupError:
    """The error for an average with NaN, which names the file it comes from."""
    with_nan = [file.path for file in files if has_nan(file.part(name, start, stop).to(torch.float64))]
    reason = f"leave out {with_nan[0]}, which has NaN there" if with_nan else "infinities cancel there"
    return SoupError(f"'{name}' of the average has NaN: {reason}")


def has_nan(block: Tensor) -> bool:
    """Whether a block has NaN. Its sum is then NaN too, which is much faster to check."""
    return bool(torch.isnan(block.sum())) and bool(torch.isnan(block).any())


def _overflowed(block: Tensor, narrow: Tensor) -> bool:
    if not block.is_floating_point() or narrow.dtype.itemsize >= block.dtype.itemsize:
        return False
    # Not all narrow dtypes support infinity and `isfinite`, so both are checked in float32.
    return bool(torch.isfinite(block).all()) and not bool(torch.isfinite(narrow.to(torch.float32)).all())
