"""Finding the weights of a network, or of several, in what a file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from papa.errors import SoupError
from papa.files.inert_pickle import Stub
from papa.files.torch_archive import StoredTensor
from papa.storage.tensors import TensorInfo

STATE_KEYS = ("state_dict", "model_state_dict", "model", "ema")
"""Where a PyTorch file may keep its state dict, in the order of preference."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "module.")
"""What may precede every name, from the outside in: a compiled model may be wrapped, and may wrap one."""
MEMBER_CONTAINERS = ("members", "models", "networks", "nets", "population", "ensemble", "replicas")
"""What a wrapper may call its networks: each counts as a member."""
MEMBER_NAME = re.compile(rf"((?:[^.]+\.)*?(?:{'|'.join(MEMBER_CONTAINERS)})\.)0\.")
LAYER_CONTAINERS = ("layers", "layer", "blocks", "h", "stages", "encoder", "decoder", "resblocks", "features")
"""What a network may call its layers."""
T = TypeVar("T")


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a file whose tensors have names."""

    name: str
    info: TensorInfo


TENSORS = (Tensor, StoredTensor, NamedTensor)
"""What stands for a tensor in the content of a file."""


@dataclass(frozen=True)
class Network(Generic[T]):
    """The tensors of one network in a file."""

    tensors: dict[str, T]
    label: str = ""
    """Where they were, if the file holds several networks."""


def find_networks(path: Path, value: Any, key: str | None) -> tuple[list[Network[Any]], list[str]]:
    """The networks in the content of a file, and notes if there was a choice.

    The content is nested mappings and lists, with tensors or what stands for them. A key has names joined by dots:
    through mappings, then the beginning of the tensors' names. A last `*` stands for each of several networks, and a
    dot at the end says that all of it is one network. None to search the usual places.
    """
    notes: list[str] = []
    rest: list[str] = []
    place = "" if key in (None, ".") else f"{key}."
    if key is None:
        value, notes, place = _usual_place(path, value)
    else:
        value, rest = _follow(path, value, key)
        if isinstance(value, list | tuple):
            value = {str(number): part for number, part in enumerate(value)}
        if rest == ["*"] and isinstance(value, Mapping) and value and all(map(has_tensors, value.values())):
            return [Network(_tensors(path, part), str(name)) for name, part in value.items()], notes
        if not has_tensors(value):
            raise SoupError(f"{path} has no state dict under '{key}': choose another key")
    tensors = without_prefix(_tensors(path, value))
    if rest == [""]:
        return [Network(tensors)], notes
    if rest:
        return _below(path, tensors, rest), notes
    dtypes = {info_of(tensor).dtype for tensor in tensors.values()}
    if tensors and not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        raise SoupError(
            f"{path} has no weights in {_listing(tensors)}, expected tensors of floating-point numbers: set the key to "
            "the place of the state dict"
        )
    return _split(path, tensors, notes, place), notes


def tensors_in(path: Path, value: Any) -> dict[str, Any]:
    """The tensors in the usual places of a file's content, under the names they have there."""
    return _tensors(path, _usual_place(path, value)[0])


def _follow(path: Path, value: Any, key: str) -> tuple[Any, list[str]]:
    """What is under a key, and the parts of the key that are left."""
    parts = key.split(".") if key != "." else [""]
    while parts and parts != ["*"] and parts != [""]:
        if isinstance(value, list | tuple) and parts[0].isdigit() and int(parts[0]) < len(value):
            value = value[int(parts[0])]
        elif isinstance(value, Mapping) and parts[0] in value and not isinstance(value[parts[0]], TENSORS):
            value = value[parts[0]]
        elif isinstance(value, Mapping) and any(str(name).startswith(f"{parts[0]}.") for name in value):
            break
        else:
            there = f"; it has {_listing(value)}" if isinstance(value, Mapping) else ""
            raise SoupError(f"{path} has nothing under '{key}'{there}: choose another key")
        parts = parts[1:]
    return value, parts


def _usual_place(path: Path, value: Any) -> tuple[Mapping[str, Any], list[str], str]:
    """The state dict in a file, notes if there was a choice, and the beginning of a key to it."""
    if not isinstance(value, Mapping):
        kind = value.name if isinstance(value, Stub) else type(value).__name__.removeprefix("Stored")
        raise SoupError(f"{path} holds a {kind}, expected a state dict: save its state dict alone")
    present = [name for name in STATE_KEYS if has_tensors(value.get(name))]
    if present:
        others = [name for name in value if name != present[0] and has_tensors(value[name])]
        note = f"used '{present[0]}', the file also has {', '.join(map(str, others))}: set the key to choose"
        return value[present[0]], [note] if others else [], f"{present[0]}."
    if not has_tensors(value):
        raise SoupError(
            f"{path} has no state dict: expected tensors, or one under {', '.join(STATE_KEYS)}; it has "
            f"{_listing(value)}: set the key to the place of the state dict"
        )
    return value, [], ""


def _tensors(path: Path, state: Mapping[Any, Any]) -> dict[str, Any]:
    """The tensors of a state dict; a `SoupError` for those that could not be read."""
    for name, value in state.items():
        kind = value.name if isinstance(value, Stub) else None
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_quantized):
            kind = f"{'quantized' if value.is_quantized else str(value.layout).removeprefix('torch.')} tensor"
        if kind is not None:
            raise SoupError(f"{path} has '{name}' as a {kind}, expected a dense tensor: save it as such")
    return {str(name): value for name, value in state.items() if isinstance(value, TENSORS)}


def _below(path: Path, tensors: dict[str, T], parts: list[str]) -> list[Network[T]]:
    """The tensors whose names begin with parts of a key."""
    if parts[-1] == "*":
        start = "".join(f"{part}." for part in parts[:-1])
        groups = _numbered({name: value for name, value in tensors.items() if name.startswith(start)}, start)
        if groups is None:
            raise SoupError(f"{path} has no networks of one architecture under '{start}0', '{start}1' and so on")
        return [Network(group, f"{start}{number}") for number, group in enumerate(groups)]
    start = ".".join(part for part in parts if part) + "."
    found = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    if not found:
        raise SoupError(f"{path} has nothing under '{start[:-1]}'; it has {_listing(tensors)}: choose another key")
    return [Network(found)]


def _split(path: Path, tensors: dict[str, T], notes: list[str], place: str) -> list[Network[T]]:
    """All tensors as one network, or as several if a wrapper holds them; `place` is the beginning of a key to them."""
    found = re.match(r"((?:[^.]+\.)*?)0\.", next(iter(tensors), "")) or next(
        filter(None, map(MEMBER_NAME.match, tensors)), None
    )
    if found is None:
        return [Network(tensors)]
    start = found[1]
    inside = {name: value for name, value in tensors.items() if name.startswith(start)}
    groups = _numbered(inside, start)
    container = start.rstrip(".").rpartition(".")[2]
    is_member = container in MEMBER_CONTAINERS
    if groups is None or (not is_member and len(inside) < len(tensors)):
        return [Network(tensors)]
    if is_member and len(inside) == len(tensors):
        notes.append(f"holds {len(groups)} networks, {start}0 to {start}{len(groups) - 1}: each counts as a member")
        return [Network(group, f"{start}{number}") for number, group in enumerate(groups)]
    if container in LAYER_CONTAINERS or not any("." in name for name in groups[0]):
        return [Network(tensors)]
    others = f" besides {len(tensors) - len(inside)} other tensors" if len(inside) < len(tensors) else ""
    raise SoupError(
        f"{path} has {len(groups)} equal parts{others}, {start}0 to {start}{len(groups) - 1}, which may be "
        f"networks or the layers of one: set the key to '{place}{start}*' for each as a member, to '{place}{start}0' "
        f"for one, or to '{place or '.'}' for all as one network"
    )


def _numbered(tensors: Mapping[str, T], start: str) -> list[dict[str, T]] | None:
    """The tensors by the number that follows `start`, if all numbers from 0 on have the same names and shapes."""
    groups: dict[int, dict[str, T]] = {}
    for name, value in tensors.items():
        found = re.match(r"(\d{1,6})\.(.+)", name[len(start) :]) if name.startswith(start) else None
        if found is None:
            return None
        groups.setdefault(int(found[1]), {})[found[2]] = value
    if len(groups) < 2 or set(groups) != set(range(len(groups))):
        return None
    shapes = [{name: info_of(value) for name, value in groups[number].items()} for number in range(len(groups))]
    return [groups[number] for number in range(len(groups))] if all(one == shapes[0] for one in shapes) else None


def info_of(value: Any) -> TensorInfo:
    """Dtype and shape of what stands for a tensor."""
    return TensorInfo.of(value) if isinstance(value, Tensor) else value.info


def has_tensors(value: Any) -> bool:
    """Whether a value is a mapping with tensors."""
    return isinstance(value, Mapping) and any(
        isinstance(part, TENSORS) or (isinstance(part, Stub) and part.name.startswith("torch._utils._rebuild_"))
        for part in value.values()
    )


def _listing(value: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(value)[:10])) or "nothing"


def without_prefix(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same values under names without the prefixes of data-parallel, averaged and compiled models."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}
    is_wrapped = False
    for prefix in WRAPPER_PREFIXES:
        if kept and all(name.startswith(prefix) for name in kept):
            kept, is_wrapped = {name.removeprefix(prefix): tensor for name, tensor in kept.items()}, True
    return kept if is_wrapped else dict(tensors)
