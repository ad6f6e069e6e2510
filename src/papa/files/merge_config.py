"""Configs of merges as mergekit writes them, for the methods that both have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from papa.errors import ConfigError, did_you_mean
from papa.files.methods import METHODS, Linear, MergeMethod
from papa.files.opening import open_weights
from papa.files.settings import Setting

KEYS = {"models", "slices", "merge_method", "base_model", "dtype", "out_dtype", "parameters", "tokenizer_source"}
WITHOUT_EFFECT = {"int8_mask"}
"""Parameters that change how mergekit computes, not what."""
SHARED = {"lambda", "normalize", "t", "rescale", "filter_wise", "seed"} | WITHOUT_EFFECT
OF_A_MODEL = {"weight", "density"}
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
"""The number of a layer in a tensor's name."""


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """What a config says: arguments of `papa.soup_files`."""

    paths: tuple[Path, ...]
    weights: tuple[Setting, ...] | None
    normalize: bool
    method: MergeMethod | None
    dtype: str | None


@dataclass(frozen=True)
class LayerSetting:
    """A setting that depends on a tensor's name, as configs write it.

    The source is a number, a list of numbers that are interpolated from the first layer to the last, or a list of
    conditions `{filter, value}`, of which the first whose filter is in the name counts. Sources are tried one after the
    other; tensors outside of layers are at the first position.
    """

    sources: tuple[Any, ...]
    num_layers: int
    label: str

    @property
    def source(self) -> Any:
        """For the record."""
        return self.sources[0]

    def __call__(self, name: str) -> float:
        """The number for a tensor."""
        for source in self.sources:
            value = self._value(source, name)
            if value is not None:
                return value
        raise ConfigError(f"the config has no {self.label} for '{name}': add a value without a filter")

    def _value(self, source: Any, name: str) -> float | None:
        if isinstance(source, int | float):
            return float(source)
        if all(isinstance(entry, int | float) for entry in source):
            return self._interpolated(source, name)
        for condition in source:
            pattern = condition.get("filter")
            if pattern in (None, "*") or pattern in name:
                return self._value(condition["value"], name)
        return None

    def _interpolated(self, values: Sequence[float], name: str) -> float:
        found = LAYER.search(name)
        last = self.num_layers - 1
        share = 0.0 if found is None else int(found[1]) / last if last > 0 else 1.0
        position = share * (len(values) - 1)
        low = int(position)
        high = min(low + 1, len(values) - 1)
        return (1 - position + low) * values[low] + (position - low) * values[high]


def merge_config(value: Any) -> MergeConfig:
    """A config of mergekit, parsed from YAML, as arguments of `papa.soup_files`.

    Models are paths of files or folders on this machine. The methods linear, slerp, task_arithmetic, ties, dare_linear,
    dare_ties and model_stock are known, with parameters for each model, gradients over layers and filters. Slices are
    taken if they are whole networks.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("base", "a"):
        ...     save_file({"w": torch.ones(2)}, folder / f"{name}.safetensors")
        >>> config = merge_config({
        ...     "merge_method": "task_arithmetic",
        ...     "base_model": f"{folder}/base.safetensors",
        ...     "models": [{"model": f"{folder}/a.safetensors", "parameters": {"weight": 0.5}}],
        ... })
        >>> config.weights
        (0.5,)

    Raises:
        ConfigError: lists everything that is wrong or not supported.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"the config holds a {type(value).__name__}, expected a mapping with merge_method and models")
    problems = [f"'{key}' is not supported" for key in value if key not in KEYS]
    kind = value.get("merge_method")
    if kind not in METHODS:
        problems.append(f"merge_method is '{kind}': {did_you_mean(str(kind), METHODS)}")
    if value.get("tokenizer_source") not in (None, "base"):
        problems.append(f"tokenizer_source is '{value['tokenizer_source']}', expected base: vocabularies stay")
    models, shared = _models(value, problems)
    shared = _parameters(value.get("parameters"), "parameters", SHARED | OF_A_MODEL, problems) | shared
    base = value.get("base_model")
    if base is not None and not isinstance(base, str):
        problems.append("base_model is no path, expected text")
    others = [model for model in models if model["model"] != base]
    if kind in METHODS and kind != "linear" and base is None:
        problems.append(f"base_model is missing, which {kind} needs")
    if not others:
        problems.append("models has no network besides the base")
    known_only_as_default = {"rescale": True, "filter_wise": False}
    problems += [
        f"{key} is {shared[key]}, expected {default}"
        for key, default in known_only_as_default.items()
        if shared.get(key, default) is not default
    ]
    _raise(problems)
    inputs = models if kind == "linear" else others
    return _built(value, str(kind), base, inputs, shared)


def _models(value: Mapping[str, Any], problems: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The models with their parameters, and the parameters of a slice."""
    models, shared = value.get("models"), {}
    slices = value.get("slices")
    if (models is None) == (slices is None):
        problems.append("expected either models or slices")
        return [], {}
    if slices is not None:
        if not isinstance(slices, list) or len(slices) != 1 or not isinstance(slices[0], Mapping):
            problems.append("slices that stack parts of networks are not supported, expected one of whole networks")
            return [], {}
        models = slices[0].get("sources")
        shared = _parameters(slices[0].get("parameters"), "the slice's parameters", SHARED | OF_A_MODEL, problems)
    found: list[dict[str, Any]] = []
    if not isinstance(models, list) or not models:
        problems.append("models is no list, expected one entry for each network")
        return [], shared
    for number, entry in enumerate(models):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("model"), str):
            problems.append(f"entry {number} of the models has no path under 'model'")
            continue
        parameters = _parameters(entry.get("parameters"), f"the parameters of {entry['model']}", OF_A_MODEL, problems)
        found.append({"model": entry["model"], "layers": entry.get("layer_range"), "parameters": parameters})
    return found, shared


def _parameters(value: Any, label: str, known: set[str], problems: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{label} is no mapping")
        return {}
    for key, setting in value.items():
        if key not in known:
            problems.append(f"{label}: '{key}' is not supported")
        elif not _is_setting(setting):
            problems.append(f"{label}: '{key}' is {setting!r}, expected a number, numbers or filters with a value")
    return {key: setting for key, setting in value.items() if key in known and _is_setting(setting)}


def _is_setting(value: Any, *, nested: bool = False) -> bool:
    if isinstance(value, bool | int | float):
        return True
    if isinstance(value, Mapping) and not nested:
        value = [value]
    if not isinstance(value, list) or not value:
        return False
    if all(isinstance(entry, int | float) for entry in value):
        return True
    return not nested and all(
        isinstance(entry, Mapping)
        and "value" in entry
        and isinstance(entry.get("filter", ""), str | None)
        and _is_setting(entry["value"], nested=True)
        for entry in value
    )


def _built(
    value: Mapping[str, Any],
    kind: str,
    base: str | None,
    inputs: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Any],
) -> MergeConfig:
    """The arguments, from a config that was checked."""
    num_layers = _num_layers(inputs[0]["model"])
    problems = [
        f"layer_range of {model['model']} is {model['layers']}, expected [0, {num_layers}]: networks are merged whole"
        for model in inputs
        if model["layers"] not in (None, [0, num_layers])
    ]

    def setting(key: str, model: Mapping[str, Any] | None = None, default: float | None = None) -> Setting:
        sources = [] if model is None or key not in model["parameters"] else [model["parameters"][key]]
        sources += [shared[key]] if key in shared else []
        sources += [] if default is None else [default]
        if not sources:
            problems.append(f"{key} is missing for {kind}" if model is None else f"{model['model']} has no {key}")
            return 0.0
        sources = [[source] if isinstance(source, Mapping) else source for source in sources]
        if isinstance(sources[0], int | float):
            return float(sources[0])
        return LayerSetting(tuple(sources), num_layers, key)

    paths = tuple(Path(model["model"]) for model in inputs)
    weights: tuple[Setting, ...] | None = None
    if METHODS[kind].takes_weights:
        weights = tuple(setting("weight", model) for model in inputs)
    method = _method(kind, base, inputs, setting, shared)
    if kind == "slerp":
        paths = (Path(str(base)), *paths)
    _raise(problems)
    normalize = kind in ("linear", "task_arithmetic", "dare_linear") and bool(shared.get("normalize", kind == "linear"))
    is_plain = isinstance(method, Linear) and not any(map(callable, weights or ()))
    dtype = value.get("out_dtype") or value.get("dtype")
    return MergeConfig(
        paths=paths, weights=weights, normalize=normalize, method=None if is_plain else method, dtype=dtype
    )


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("the config cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))


def _num_layers(path: str) -> int:
    """The number of layers of a network, from the names of its tensors; 0 if it has none."""
    numbers = [found[1] for name in open_weights(path).tensors if (found := LAYER.search(name))]
    return max(map(int, numbers), default=-1) + 1


def _method(
    kind: str, base: Any, inputs: Any, setting: Callable[..., Setting], shared: Mapping[str, Any]
) -> MergeMethod:
    """The method with the settings that it has."""
    known: dict[str, Callable[[], Any]] = {
        "base": lambda: base,
        "t": lambda: setting("t"),
        "scale": lambda: setting("lambda", None, 1.0),
        "density": lambda: tuple(setting("density", model, 1.0) for model in inputs),
        "normalize": lambda: bool(shared.get("normalize", kind == "ties")),
        "seed": lambda: int(shared.get("seed", 0)),
    }
    method = METHODS[kind]
    return method(**{field.name: known[field.name]() for field in fields(method)})
