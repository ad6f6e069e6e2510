"""LoRA adapters: their products are averaged, not their factors.

An adapter adds `s B A` to a weight, with `s = alpha / r`. The mean of products is no product of means, but factors next
to each other give it exactly, with the ranks added up:

    sum_j w_j s_j B_j A_j = [w_1 s_1 B_1, w_2 s_2 B_2, ...] [A_1; A_2; ...]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from papa.errors import SoupError
from papa.files.average import WeightedAverage, differences, raise_differences
from papa.files.storage import TensorInfo, read_object
from papa.files.weights import WeightsFile

CONFIG_NAME = "adapter_config.json"
FACTOR = re.compile(r"(.*)\.lora_(embedding_)?([AB])(?:\.(?:default\.)?weight)?")
"""The name of a factor: the module, and which of the two it is."""
OTHER_FACTORS = ("lora_down.", "lora_up.", "lora_magnitude_vector", "hada_w1", "lokr_w1")
"""In the names of factors and scales of other kinds of adapters."""
NOT_AVERAGED = {
    "use_dora": "DoRA divides by norms",
    "lora_bias": "its factors have biases",
    "use_qalora": "QALoRA pools the inputs",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it acts on some tokens only",
}
"""Options of adapters whose average is not that of their products."""
PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")
"""How factors begin, if the base stays as it is."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its tensors, and the config beside them."""

    weights: WeightsFile
    config: Mapping[str, Any]

    def scale(self, module: str) -> float:
        """What the product of a module's factors is multiplied with."""
        rank = self.rank(module)
        alpha = self.config.get("lora_alpha", 8)
        for key, value in (self.config.get("alpha_pattern") or {}).items():
            if module == key or module.endswith(f".{key}"):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def rank(self, module: str) -> int:
        """The rank of a module's product."""
        return self.weights.tensors[self.factor_names[module][0]].shape[0]

    @property
    def factor_names(self) -> dict[str, tuple[str, str]]:
        """The names of A and B of each module."""
        return factors_in(self.weights)

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """A as (r, inputs) and B as (outputs, r), in float32 or wider."""
        first, second = (self.weights.read(name).flatten(1) for name in self.factor_names[module])
        dtype = torch.promote_types(torch.float32, first.dtype)
        return first.to(dtype), second.to(dtype)


def factors_in(weights: WeightsFile) -> dict[str, tuple[str, str]]:
    """The names of LoRA's factors A and B in a file, by module."""
    found: dict[str, dict[str, str]] = {}
    for name in weights.tensors:
        match = FACTOR.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], {})[match[3]] = name
    return {module: (pair["A"], pair["B"]) for module, pair in found.items() if len(pair) == 2}


def is_adapter(weights: WeightsFile) -> bool:
    """Whether a file holds factors of an adapter, or has the config of one beside it."""
    names = any(FACTOR.fullmatch(name) or any(mark in name for mark in OTHER_FACTORS) for name in weights.tensors)
    return names or _config_path(weights).is_file()


def _config_path(weights: WeightsFile) -> Path:
    return (weights.files[0] if weights.files else weights.path).parent / CONFIG_NAME


def open_adapters(files: Sequence[WeightsFile]) -> list[Adapter]:
    """Files as adapters that can be averaged, or a `SoupError` that lists what is wrong with each."""
    adapters, problems = [], []
    for weights in files:
        path = _config_path(weights)
        if not factors_in(weights) or not path.is_file():
            problems.append(f"{weights.path}: {_missing(weights)}")
            continue
        adapter = Adapter(weights, read_object(path, error=SoupError))
        problems += [f"{weights.path}: {problem}" for problem in _problems(adapter)]
        adapters.append(adapter)
    if problems:
        raise SoupError("these adapters cannot be averaged:\n" + "\n".join(f"  {problem}" for problem in problems))
    for other in adapters[1:]:
        subject = f"{other.weights.path} cannot be averaged with {adapters[0].weights.path}"
        raise_differences(subject, differences(_products(adapters[0]), _products(other)))
    return adapters


def _missing(weights: WeightsFile) -> str:
    """Why a file is no LoRA adapter."""
    if _config_path(weights).is_file() or not is_adapter(weights):
        return "it holds no factors of LoRA"
    return (
        "it holds factors of an adapter, whose means do not give the mean of their products, and there is no "
        f"{CONFIG_NAME} beside it: merge them into the weights, or name the adapter's folder"
    )


def _problems(adapter: Adapter) -> list[str]:
    config = adapter.config
    found = [f"{reason} ({key})" for key, reason in NOT_AVERAGED.items() if config.get(key)]
    if config.get("peft_type", "LORA") != "LORA":
        found.append(f"it is of the kind {config['peft_type']}, expected LORA")
    if config.get("init_lora_weights", True) not in PLAIN_INITS:
        found.append(f"it changes the base weights (init_lora_weights is {config['init_lora_weights']})")
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(re.fullmatch(r"[\w.-]+", str(key)) for key in pattern):
        found.append("its alpha_pattern has regular expressions, expected names of modules")
        pattern = {}
    for value in (config.get("lora_alpha", 8), *pattern.values()):
        if type(value) not in (int, float):
            found.append(f"its lora_alpha is {value!r}, expected a number")
    for module, names in adapter.factor_names.items():
        first, second = (adapter.weights.tensors[name].shape for name in names)
        if len(first) < 2 or len(second) < 2 or first[0] != second[1] or not first[0] or math.prod(second[2:]) != 1:
            found.append(f"the factors of {module} are {list(first)} and {list(second)}, which have no product")
    return found


def _products(adapter: Adapter) -> dict[str, TensorInfo]:
    """The tensors of an adapter with its products in place of factors."""
    tensors = adapter.weights.tensors
    factors = {name for pair in adapter.factor_names.values() for name in pair}
    found = {name: info for name, info in tensors.items() if name not in factors}
    for module, (first, second) in adapter.factor_names.items():
        found[module] = TensorInfo(tensors[first].dtype, (tensors[second].shape[0], *tensors[first].shape[1:]))
    return found


def product_weights(adapter: Adapter) -> WeightsFile:
    """An adapter as what it adds to each weight, computed row by row when it is read."""
    infos = _products(adapter)
    factors = lru_cache(maxsize=1)(adapter.factors)

    def part(name: str, start: int, stop: int) -> Tensor:
        if name not in adapter.factor_names:
            return adapter.weights.part(name, start, stop)
        first, second = factors(name)
        width = first.shape[1]
        low, high = start // width, -(-stop // width)
        rows = adapter.scale(name) * (second[low:high] @ first)
        return rows.reshape(-1)[start - low * width : stop - low * width]

    return WeightsFile(adapter.weights.path, infos, part, adapter.weights.files, adapter.weights.notes)


class AdapterAverage(WeightedAverage):
    """The weighted average of adapters as an adapter: factors side by side, or of a lower rank by SVD.

    Adapters have the same modules; ranks may differ. One of weight 0 is left out. A rank of None is the sum of all
    ranks.
    """

    def __init__(self, adapters: Sequence[Adapter], weights: Sequence[float], rank: int | None = None) -> None:
        super().__init__([adapter.weights for adapter in adapters], weights)
        self._adapters = [(adapter, weight) for adapter, weight in zip(adapters, weights, strict=True) if weight]
        first = adapters[0]
        self._names = {name: module for module, pair in first.factor_names.items() for name in pair}
        exact = max(sum(adapter.rank(module) for adapter, _ in self._adapters) for module in first.factor_names)
        self.rank = exact if rank is None else min(rank, exact)
        self._first, self._is_exact = first, self.rank == exact
        self._factors = lru_cache(maxsize=1)(self._average_factors)

    def tensors(self, dtype: torch.dtype | None) -> dict[str, TensorInfo]:
        """The tensors of the average."""
        found = {}
        for name, info in self._first.weights.tensors.items():
            shape = info.shape
            if name in self._names:
                is_first = name == self._first.factor_names[self._names[name]][0]
                shape = (self.rank, *shape[1:]) if is_first else (shape[0], self.rank, *shape[2:])
            found[name] = TensorInfo(dtype if dtype is not None and info.dtype.is_floating_point else info.dtype, shape)
        return found

    def config(self) -> dict[str, Any]:
        """The config of the average: that of the first, with the new rank and a scale of 1."""
        changed = {
            "r": self.rank,
            "lora_alpha": self.rank,
            "use_rslora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        return {**self._first.config, **changed, "init_lora_weights": True, "inference_mode": True}

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A factor of the average; other tensors are averaged as usual."""
        module = self._names.get(name)
        if module is None:
            yield from super().blocks(name)
        else:
            pair = self._factors(module)
            yield pair[self._first.factor_names[module].index(name)].contiguous().reshape(-1)

    def _average_factors(self, module: str) -> tuple[Tensor, Tensor]:
        firsts, seconds = [], []
        for adapter, weight in self._adapters:
            first, second = adapter.factors(module)
            firsts.append(first)
            seconds.append(weight * adapter.scale(module) * second)
        first, second = torch.cat(firsts), torch.cat(seconds, dim=1)
        if not self._is_exact:
            first, second = of_rank(first, second, self.rank)
        missing = self.rank - first.shape[0]  # zeros add nothing to the product
        return torch.nn.functional.pad(first, (0, 0, 0, missing)), torch.nn.functional.pad(second, (0, missing))


def of_rank(first: Tensor, second: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of at most `rank` whose product is nearest to `second @ first`, by an SVD of the size of the factors."""
    if first.shape[0] <= rank:
        return first, second
    left, left_core = torch.linalg.qr(second.double())
    right, right_core = torch.linalg.qr(first.double().T)
    u, s, v = torch.linalg.svd(left_core @ right_core.T)
    root = s[:rank].sqrt()
    return ((root[:, None] * v[:rank]) @ right.T).to(first.dtype), (left @ (u[:, :rank] * root)).to(second.dtype)
