"""Numbers that may differ between tensors, and the weights of files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from papa.core import mixing
from papa.errors import ConfigError, SoupError
from papa.files.storage import TensorInfo

Setting: TypeAlias = float | Callable[[str], float]
"""A number, or a function from a tensor's name to it."""


def value_at(setting: Setting, name: str) -> float:
    """A setting for one tensor."""
    return float(setting(name) if callable(setting) else setting)


def outside(names: Iterable[str], settings: Iterable[tuple[str, Setting]], low: float, high: float) -> list[str]:
    """What settings are outside of their range."""
    found = {}
    for label, setting in settings:
        for name in names if callable(setting) else ("",):
            value = value_at(setting, name)
            if not (math.isfinite(value) and low <= value <= high):
                where = f" for '{name}'" if name else ""
                found[label] = f"{label} is {value:g}{where}, expected a number from {low:g} to {high:g}"
                break
    return list(found.values())


def mean_of(setting: Setting, tensors: Mapping[str, TensorInfo]) -> float:
    """A setting's mean over all numbers of a network."""
    if not callable(setting):
        return float(setting)
    total = sum(info.numel for info in tensors.values())
    return sum(setting(name) * info.numel for name, info in tensors.items()) / max(total, 1)


def checked_weights(weights: Sequence[Setting] | None, size: int, *, normalize: bool) -> list[float]:
    """One weight for each of `size` files, non-negative and summing to 1."""
    if weights is None:
        if normalize:
            raise ConfigError("there are no weights to normalize: give weights, or do not normalize")
        return [1.0 / size] * size
    if any(map(callable, weights)):
        raise ConfigError("weights that differ between tensors are for networks, expected numbers")
    row = torch.tensor([value_at(weight, "") for weight in weights], dtype=torch.float64)
    if len(row) != size:
        raise SoupError(f"there are {len(row)} weights for {size} files, expected one for each")
    if not torch.isfinite(row).all() or (row < 0).any() or not row.any():
        raise SoupError(f"the weights are {row.tolist()}, expected finite numbers, none below 0 and some above it")
    total = float(row.sum())
    if not normalize and abs(total - 1.0) > mixing.ROW_SUM_TOLERANCE:
        raise SoupError(f"the weights sum to {total:.6g}, expected 1: correct them, or normalize them")
    values: list[float] = (row / total).tolist()
    return values
