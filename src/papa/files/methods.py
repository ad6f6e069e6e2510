"""How files are merged: each method says what it needs, and gives the merged tensors block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from papa.core.chosen_soups import stock_ratio
from papa.errors import ConfigError, SoupError
from papa.files.average import (
    BLOCK,
    TensorwiseAverage,
    WeightedAverage,
    has_nan,
    inner_products,
    is_averaged,
    nan_error,
    wide,
)
from papa.files.merge_functions import dropped, kth_largest, merged_by_sign, slerp_weights, task_weights, trimmed
from papa.files.settings import Setting, outside, value_at
from papa.files.weights import PathLike, WeightsFile
from papa.streams import stream

Files: TypeAlias = Sequence[WeightsFile]
Settings: TypeAlias = Sequence[Setting]


@dataclass(frozen=True, kw_only=True)
class MergeMethod(ABC):
    """A way to merge files other than their weighted mean."""

    name: ClassVar[str]
    takes_weights: ClassVar[bool] = True

    @property
    def base_path(self) -> PathLike | None:
        """The file that all others were fine-tuned from, if the method needs it."""
        return getattr(self, "base", None)

    def problems(self, num_files: int, names: Sequence[str]) -> list[str]:
        """What is wrong with the settings, for tensors of these names."""
        return []

    @abstractmethod
    def average(self, files: Files, weights: Settings, base: WeightsFile | None) -> WeightedAverage:
        """The merged tensors."""

    def to_json(self) -> dict[str, Any]:
        """The method and its settings."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "base"}
        return {"name": self.name} | {name: _shown(value) for name, value in values.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shown(part) for part in value]
    return getattr(value, "source", "by tensor") if callable(value) else value


@dataclass(frozen=True, kw_only=True)
class Linear(MergeMethod):
    """The weighted mean, with weights that may differ between tensors and are divided by their sum."""

    name = "linear"

    def average(self, files: Files, weights: Settings, base: WeightsFile | None) -> WeightedAverage:
        """A weighted average."""

        def weights_of(name: str) -> list[float]:
            values = [value_at(weight, name) for weight in weights]
            if min(values) < 0 or not sum(values):
                raise ConfigError(f"the weights of '{name}' are {values}, expected none below 0 and some above it")
            return [value / sum(values) for value in values]

        return TensorwiseAverage(files, weights_of)


@dataclass(frozen=True, kw_only=True)
class ModelStock(MergeMethod):
    """Model Stock: the mean, moved back toward the base tensor by tensor (`papa.model_stock`)."""

    name = "model_stock"
    takes_weights = False

    base: PathLike

    def problems(self, num_files: int, names: Sequence[str]) -> list[str]:
        """It compares networks."""
        return [] if num_files > 1 else [f"Model Stock compares networks, got {num_files}, expected at least two"]

    def average(self, files: Files, weights: Settings, base: WeightsFile | None) -> WeightedAverage:
        """The weights of a tensor come from a first pass over it."""
        assert base is not None

        @lru_cache(maxsize=1)
        def weights_of(name: str) -> list[float]:
            is_number = is_averaged(base.tensors[name].dtype)
            ratio = stock_ratio(inner_products(files, name, base)) if is_number else 1.0
            return task_weights([1.0 / len(files)] * len(files), ratio)

        return TensorwiseAverage([*files, base], weights_of)


@dataclass(frozen=True, kw_only=True)
class Slerp(MergeMethod):
    """Spherical interpolation from the first of two files to the second, tensor by tensor."""

    name = "slerp"
    takes_weights = False

    t: Setting = 0.5
    """0 gives the first file, 1 the second."""

    def problems(self, num_files: int, names: Sequence[str]) -> list[str]:
        """It takes two files, and a position between them."""
        found = [] if num_files == 2 else [f"slerp interpolates between two networks, got {num_files}"]
        return found + outside(names, [("t", self.t)], 0.0, 1.0)

    def average(self, files: Files, weights: Settings, base: WeightsFile | None) -> WeightedAverage:
        """The weights of a tensor come from a first pass over it."""

        @lru_cache(maxsize=1)
        def weights_of(name: str) -> Sequence[float]:
            t = value_at(self.t, name)
            is_number = is_averaged(files[0].tensors[name].dtype)
            return slerp_weights(inner_products(files, name), t) if is_number else (1.0, 0.0)

        return TensorwiseAverage(files, weights_of)


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic(MergeMethod):
    """Task arithmetic: `base + scale * sum_j w_j (file_j - base)`. Weights may have any sum and sign."""

    name = "task_arithmetic"

    base: PathLike
    """The file that all others were fine-tuned from."""
    scale: Setting = 1.0
    """What the sum of weighted differences is multiplied with."""

    def average(self, files: Files, weights: Settings, base: WeightsFile | None) -> WeightedAverage:
        """A weighted average of the files and the base."""
        assert base is not None

        def weights_of(name: str) -> list[float]:
            if not is_averaged(base.tensors[name].dtype):
                return [0.0] * len(files) + [1.0]
            return task_weights([value_at(weight, name) for weight in weights], value_at(self.scale, name))

        return TensorwiseAverage([*files, base], weights_of)


@dataclass(frozen=True, kw_only=True)
class SparseMerge(TaskArithmetic):
    """Task arithmetic of sparse differences."""

    density: Setting | Sequence[Setting]
    """The share of each file's differences that is kept, or one for each file."""

    def densities(self, num_files: int) -> list[Setting]:
        """The density of each file."""
        return list(self.density) if isinstance(self.density, Sequence) else [self.density] * num_files

    def problems(self, num_files: int, names: Sequence[str]) -> list[str]:
        """Densities are shares, one for each file."""
        densities = self.densities(num_files)
        if len(densities) != num_files:
            return [f"there are {len(densities)} densities for {num_files} files, expected one for each"]
        return outside(names, [("the density", density) for density in densities], 0.0, 1.0)

    def average(self, files: Files, weights: Settings, base: WeightsFile | None) -> WeightedAverage:
        """Sparse differences are made and combined block by block."""
        assert base is not None
        return _SparseAverage(self, files, weights, base)

    @abstractmethod
    def sparsifier(self, source: _TaskVector, density: float) -> Callable[[Tensor], Tensor]:
        """What makes the blocks of a task vector sparse, called with one after the other."""

    @abstractmethod
    def combine(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """One task vector from several."""


@dataclass(frozen=True, kw_only=True)
class Ties(SparseMerge):
    """TIES: the largest differences of each file; where signs differ, only those of the heavier sign count."""

    name = "ties"

    density: Setting | Sequence[Setting] = 0.2
    normalize: bool = True
    """Divide by the weights of the files that agree."""

    def sparsifier(self, source: _TaskVector, density: float) -> Callable[[Tensor], Tensor]:
        """Keep the largest."""
        if density == 1.0 or not source.numel:
            return lambda delta: delta
        if not density:
            return torch.zeros_like
        count = max(1, int(density * source.numel))
        limit, left = kth_largest(lambda: (block.abs() for block in source.blocks()), count)

        def trim(delta: Tensor) -> Tensor:
            nonlocal left
            kept, left = trimmed(delta, limit, left)
            return kept

        return trim

    def combine(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Only what agrees in sign."""
        return merged_by_sign(deltas, weights, normalize=self.normalize)


@dataclass(frozen=True, kw_only=True)
class DareLinear(SparseMerge):
    """DARE: differences are dropped at random and the others divided by the density, then added."""

    name = "dare_linear"

    seed: int = 0
    """Which differences are dropped is a function of the seed, the number of the file and the tensor's name."""

    def sparsifier(self, source: _TaskVector, density: float) -> Callable[[Tensor], Tensor]:
        """Drop at random."""
        if not density:
            return torch.zeros_like
        generator = stream(self.seed, f"dare/{source.name}", member=source.member)
        return lambda delta: dropped(delta, density, generator)

    def combine(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum."""
        return (weights.to(deltas.dtype).reshape(-1, *[1] * (deltas.dim() - 1)) * deltas).sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class DareTies(DareLinear):
    """DARE, with the signs of TIES."""

    name = "dare_ties"

    normalize: bool = False
    """Divide by the weights of the files that agree."""

    def combine(self, deltas: Tensor, weights: Tensor) -> Tensor:
        """Only what agrees in sign."""
        return merged_by_sign(deltas, weights, normalize=self.normalize)


METHODS: dict[str, type[MergeMethod]] = {
    method.name: method for method in (Linear, Slerp, TaskArithmetic, Ties, DareLinear, DareTies, ModelStock)
}


@dataclass(frozen=True)
class _TaskVector:
    """One tensor of a file minus that of the base, block by block."""

    file: WeightsFile
    base: WeightsFile
    name: str
    member: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.file.tensors[self.name].numel

    def block(self, start: int, origin: Tensor) -> Tensor:
        """Its elements from `start` on, as many as the block of the base has."""
        return self.file.part(self.name, start, start + len(origin)).to(self.dtype) - origin

    def blocks(self) -> Iterator[Tensor]:
        for start, origin in _blocks(self.base, self.name, self.dtype):
            yield self.block(start, origin)


def _blocks(file: WeightsFile, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    numel = file.tensors[name].numel
    for start in range(0, numel, BLOCK):
        yield start, file.part(name, start, min(start + BLOCK, numel)).to(dtype)


class _SparseAverage(WeightedAverage):
    def __init__(self, method: SparseMerge, files: Files, weights: Settings, base: WeightsFile) -> None:
        self._method, self._files, self._weights, self._base = method, list(files), list(weights), base

    def blocks(self, name: str) -> Iterator[Tensor]:
        info = self._base.tensors[name]
        if not is_averaged(info.dtype):
            yield from WeightedAverage([self._base], [1.0]).blocks(name)
            return
        dtype = wide(info.dtype)
        for file in self._files:
            dtype = torch.promote_types(dtype, wide(file.tensors[name].dtype))
        sources = [_TaskVector(file, self._base, name, member, dtype) for member, file in enumerate(self._files)]
        densities = [value_at(density, name) for density in self._method.densities(len(sources))]
        sparse = list(map(self._method.sparsifier, sources, densities))
        weights = torch.tensor([value_at(weight, name) for weight in self._weights], dtype=torch.float64)
        scale = value_at(self._method.scale, name)
        for start, origin in _blocks(self._base, name, dtype):
            blocks = [source.block(start, origin) for source in sources]
            if any(map(has_nan, blocks)):  # a sparse merge might leave it out
                raise nan_error([*self._files, self._base], name, start, start + len(origin))
            deltas = torch.stack([keep(block) for keep, block in zip(sparse, blocks, strict=True)])
            yield origin + scale * self._method.combine(deltas, weights)


def checked_settings(method: MergeMethod, files: Files) -> None:
    """Raise a `ConfigError` that lists everything that is wrong with a method's settings."""
    found = method.problems(len(files), list(files[0].tensors))
    if isinstance(method, TaskArithmetic):
        found += outside(files[0].tensors, [("the scale", method.scale)], -100.0, 100.0)
    if found:
        raise ConfigError(f"{method.name} cannot be used: {'; '.join(found)}")


def method_weights(method: MergeMethod, weights: Settings | None, files: Files, *, normalize: bool) -> list[Setting]:
    """One weight for each file, finite and of any sum and sign."""
    count = len(files)
    if not method.takes_weights:
        return [1.0 / count] * count
    if weights is None:
        if not isinstance(method, Ties):
            raise ConfigError(
                f"{method.name} adds up differences from the base: give one weight for each file, which decide how far "
                f"the soup goes, such as {1 / count:.2g} for the mean of {count}"
            )
        return [1.0] * count
    if len(weights) != count:
        raise SoupError(f"there are {len(weights)} weights for {count} files, expected one for each")
    found = outside(files[0].tensors, [("a weight", weight) for weight in weights], -100.0, 100.0)
    if found:
        raise SoupError("; ".join(found))
    if not normalize:
        return list(weights)

    def share(number: int, name: str) -> float:
        values = [value_at(weight, name) for weight in weights]
        return values[number] / sum(values) if sum(values) else values[number]

    return [partial(share, number) for number in range(count)]
