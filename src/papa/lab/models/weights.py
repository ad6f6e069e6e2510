"""Weights from a local file into a network that was built for them, or for another number of classes."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from papa.errors import ConfigError
from papa.lab.models.head import head_modules

FilePath: TypeAlias = str | os.PathLike[str]

_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "ema")
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # DistributedDataParallel and torch.compile put these before every key
_NUM_DIFFERENCES_SHOWN = 10


def load_weights_(model: nn.Module, path: FilePath) -> list[str]:
    """Fill a network from a file; the classifier stays as it is when the file has other classes, or none.

    Example:
        >>> import tempfile
        >>> from papa.lab.models import VGG
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(VGG(11, num_classes=100, width=4).state_dict(), f"{folder}/vgg.pt")
        ...     load_weights_(VGG(11, num_classes=10, width=4), f"{folder}/vgg.pt")
        ['head.weight', 'head.bias']

    A file that does not fit a timm network as it is goes through timm's own conversion (`checkpoint_filter_fn`), as
    the files that timm downloads do. The first convolution is not adapted to another number of channels.

    Args:
        model: changed in place, and only when everything fits.
        path: a `.safetensors` file, or one that `torch.load(weights_only=True)` reads: a state dict, by itself or under
            `state_dict`, `model_state_dict`, `model` or `ema`.

    Returns:
        The names of the classifier's tensors that the file could not fill. Everything else was filled.
    """
    found = read_state_dict(path)
    expected = model.state_dict()
    new_head = _unfilled_head(model, found, expected)
    differences = _differences(found, expected, new_head)
    if differences:
        converted = _converted_by_timm(model, found)
        if converted is not None:
            new_head_converted = _unfilled_head(model, converted, expected)
            remaining = _differences(converted, expected, new_head_converted)
            if len(remaining) < len(differences):
                found, new_head, differences = converted, new_head_converted, remaining
    if differences:
        shown = "; ".join(differences[:_NUM_DIFFERENCES_SHOWN])
        more = len(differences) - _NUM_DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ConfigError(
            f"the weights in {path} do not fit {type(model).__name__}: {shown}{rest}. Expected weights of the same "
            "network and options; only the classifier may have another number of classes"
        )
    model.load_state_dict({name: tensor for name, tensor in found.items() if name not in new_head}, strict=False)
    return new_head


def read_state_dict(path: FilePath) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, without the wrappings that training scripts add."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no weights file at {path}: expected a .safetensors file or one by torch.save")
    content = _read(path)
    for key in _NESTED_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{path} holds {_described(content)}, expected a state dict")
    strangers = [str(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if strangers:
        raise ConfigError(
            f"{path} holds entries that are no tensors ({', '.join(strangers[:_NUM_DIFFERENCES_SHOWN])}), expected a "
            f"state dict, by itself or under one of {', '.join(_NESTED_UNDER)}"
        )
    return _without_wrapper_prefixes(dict(content))


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(f"{path} is no safetensors file ({error}): was it downloaded completely?") from error
    _check_not_packed(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} was refused, since it holds more than tensors and loading it could run code, or is damaged. "
            f"Save the state dict alone, best as .safetensors. PyTorch says: {error}"
        ) from error
    except Exception as error:  # a damaged file makes it stumble in many ways
        raise ConfigError(f"{path} cannot be read by torch.load ({error}): expected a file by torch.save") from error


def _check_not_packed(path: Path) -> None:
    """Refuse archives that unpack to more than they are; `torch.save` never packs."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            is_packed = sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size
    except Exception as error:
        raise ConfigError(f"{path} cannot be read ({error}): expected a file by torch.save") from error
    if is_packed:
        raise ConfigError(f"{path} holds more than its size allows, which torch.save does not do: it was refused")


def _described(content: Any) -> str:
    return "nothing" if isinstance(content, Mapping) else f"a {type(content).__name__}"


def _without_wrapper_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _WRAPPER_PREFIXES:
        if all(name.startswith(prefix) for name in state):
            return _without_wrapper_prefixes({name.removeprefix(prefix): tensor for name, tensor in state.items()})
    return state


def _unfilled_head(model: nn.Module, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The classifier's tensors that the file has for another number of classes; all of them when it has none."""
    heads = set(head_modules(model))
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module in heads)
    names = [name for name in expected if name.startswith(prefixes)]
    if not any(name in found for name in names):
        return names
    return [name for name in names if name in found and _differ_in_first_length_only(found[name], expected[name])]


def _differ_in_first_length_only(one: Tensor, other: Tensor) -> bool:
    return one.shape[:1] != other.shape[:1] and one.shape[1:] == other.shape[1:]


def _differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], ignored: list[str]) -> list[str]:
    listed = []
    for name in [*expected, *(name for name in found if name not in expected)]:
        found_shape = tuple(found[name].shape) if name in found else "nothing"
        expected_shape = tuple(expected[name].shape) if name in expected else "nothing"
        if found_shape != expected_shape and name not in ignored:
            listed.append(f"'{name}' found {found_shape}, expected {expected_shape}")
    return listed


def _converted_by_timm(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """What timm makes of weights in an older or foreign layout; None when it has no conversion for this network."""
    for kind in type(model).__mro__:
        convert = getattr(sys.modules.get(kind.__module__), "checkpoint_filter_fn", None)
        if convert is not None:
            try:
                return dict(convert(dict(state), model))
            except Exception:
                # Conversions expect their own kind of file and stumble in their own ways over any other. The caller
                # then reports how the file differs, which says more.
                return None
    return None
