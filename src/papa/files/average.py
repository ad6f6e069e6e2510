"""Averaging weights block by block: memory holds a few blocks, however large and many the files are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from papa.core.product import accumulation_dtype
from papa.errors import SoupError
from papa.files.learned import stock_ratio
from papa.files.weights import WeightsFile
from papa.storage.tensors import Blocks, TensorInfo

BLOCK = 1 << 18
"""The number of elements that are averaged at a time: they fit into the processor's cache."""
MAX_DIFFERENCES = 10
"""The number of differences that a message lists."""


def is_averaged(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype are averaged; integers and booleans, such as counters and masks, are not."""
    return dtype.is_floating_point or dtype.is_complex


def differences(first: Mapping[str, TensorInfo], other: Mapping[str, TensorInfo]) -> list[str]:
    """Why two sets of weights cannot be averaged; dtypes may differ."""
    found = [f"no '{name}' {first[name]}" for name in first if name not in other]
    found += [f"an extra '{name}' {other[name]}" for name in other if name not in first]
    for name, one in first.items():
        two = other.get(name, one)
        is_alike = is_averaged(one.dtype) == is_averaged(two.dtype) and one.dtype.is_complex == two.dtype.is_complex
        if one.shape != two.shape or not is_alike:
            found.append(f"'{name}' {two} instead of {one}")
    return found


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


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    """The first and the last (exclusive) element of each block."""
    return ((start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))


def average(files: Sequence[WeightsFile], weights: Sequence[float]) -> Blocks:
    """The weighted average of files, in float32 or wider.

        average = sum_j w_j file_j

    A file with weight 0 is not read. Integer tensors are those of the first file with a weight.
    """
    used = [(file, weight) for file, weight in zip(files, weights, strict=True) if weight]

    def blocks(name: str) -> Iterator[Tensor]:
        info = used[0][0].tensors[name]
        if not is_averaged(info.dtype):
            yield from (used[0][0].part(name, start, stop) for start, stop in ranges(info.numel))
            return
        dtype = reduce(torch.promote_types, [accumulation_dtype(file.tensors[name].dtype) for file, _ in used])
        for start, stop in ranges(info.numel):
            (first, weight), *others = used
            total = first.part(name, start, stop).to(dtype)
            total = total if weight == 1.0 else total * weight
            for file, weight in others:
                total = total.add(file.part(name, start, stop).to(dtype), alpha=weight)
            if others and _has_nan(total):
                found = [file.path for file, _ in used if _has_nan(file.part(name, start, stop).to(dtype))]
                reason = f"leave out {found[0]}, which has NaN there" if found else "infinities cancel there"
                raise SoupError(f"'{name}' of the average has NaN: {reason}")
            yield total

    return blocks


def stock_average(files: Sequence[WeightsFile], base: WeightsFile) -> Blocks:
    """Model Stock: the mean of files, moved back toward the base tensor by tensor (`papa.model_stock`).

    The share of the mean comes from a first pass over a tensor.
    """

    def blocks(name: str) -> Iterator[Tensor]:
        info, ratio = base.tensors[name], 1.0
        if is_averaged(info.dtype):
            products = torch.zeros(len(files), len(files), dtype=torch.float64)
            for start, stop in ranges(info.numel):
                rows = torch.stack([file.part(name, start, stop).to(torch.float64) for file in files])
                rows -= base.part(name, start, stop).to(torch.float64)
                products += rows @ rows.T
            ratio = stock_ratio(products)
        weights = [ratio / len(files)] * len(files) + [1.0 - ratio]
        yield from average([*files, base], weights)(name)

    return blocks


def in_dtypes(blocks: Blocks, tensors: Mapping[str, TensorInfo]) -> Blocks:
    """The same numbers in the dtypes of some tensors; a `SoupError` for those that these cannot hold."""

    def stored(name: str) -> Iterator[Tensor]:
        dtype = tensors[name].dtype
        for block in blocks(name):
            narrow = block.to(dtype)
            # Not all narrow dtypes support infinity and `isfinite`, so both are checked in float32.
            is_narrower = block.is_floating_point() and dtype.itemsize < block.dtype.itemsize
            if is_narrower and block.isfinite().all() and not narrow.to(torch.float32).isfinite().all():
                raise SoupError(f"'{name}' has numbers that {dtype} cannot hold: choose a wider dtype")
            yield narrow

    return stored


def _has_nan(block: Tensor) -> bool:
    """Whether a block has NaN. Its sum is then NaN too, which is much faster to check."""
    return bool(torch.isnan(block.sum())) and bool(torch.isnan(block).any())
