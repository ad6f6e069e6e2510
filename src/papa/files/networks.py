"""Finding the weights of a network, or of several, in what a file holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from papa.errors import SoupError
from papa.storage import file_errors
from papa.storage.tensors import TensorInfo, identity_of

STATE_KEYS = ("state_dict", "model_state_dict", "model", "ema")
"""Where a PyTorch file may keep its state dict, in the order of preference."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "module.")
"""What may precede every name, from the outside in: a compiled model may be wrapped, and may wrap one."""
MEMBER_CONTAINERS = ("members", "models", "networks", "nets", "population", "ensemble", "replicas")
"""What a wrapper may call its networks: each counts as a member."""
NUMBERED = re.compile(r"((?:[^.]+\.)*?)\d{1,6}\.")
"""The beginning of the names of tensors in a list of modules."""
LEAST_LIMIT = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its dtype and shape, and a function that reads some elements of it, flattened."""

    info: TensorInfo
    part: Callable[[int, int], Tensor]


TENSORS = (Tensor, StoredTensor)
Stored = Mapping[str, StoredTensor]


def find_networks(path: Path, value: Any, key: str | None) -> tuple[list[tuple[str, Stored]], list[str]]:
    """The networks in the content of a file, each with its place if there are several, and notes about the choice.

    The content is nested mappings and lists of tensors. A key has names joined by dots: through mappings and lists,
    then the beginning of the tensors' names. A last `*` stands for each of several networks; "." is all of it as one
    network. None to search the usual places.
    """
    if key is not None:
        return _at_key(path, value, key), []
    if not isinstance(value, Mapping):
        raise SoupError(f"{path} holds a {type(value).__name__}, expected a state dict: save its state dict alone")
    notes: list[str] = []
    if present := [name for name in STATE_KEYS if _has_tensors(value.get(name))]:
        others = [str(name) for name in value if name != present[0] and _has_tensors(value[name])]
        if others:
            notes = [f"used '{present[0]}', the file also has {', '.join(others)}: set the key to choose"]
        value = value[present[0]]
    elif not _has_tensors(value):
        raise SoupError(
            f"{path} has no state dict: expected tensors, or one under {', '.join(STATE_KEYS)}; it has "
            f"{_listing(value)}: set the key to the place of the state dict"
        )
    tensors = _without_prefix(stored_tensors(path, value))
    if not any(stored.info.dtype.is_floating_point or stored.info.dtype.is_complex for stored in tensors.values()):
        raise SoupError(
            f"{path} has no weights in {_listing(tensors)}, expected tensors of floating-point numbers: set the key to "
            "the place of the state dict"
        )
    found = NUMBERED.match(next(iter(tensors)))
    start = "" if found is None else found[1]
    is_list = start.rstrip(".").rpartition(".")[2] in MEMBER_CONTAINERS
    groups = _numbered(tensors, start) if is_list else None
    if groups is None or not any("." in name for name in groups[0]):
        return [("", tensors)], notes
    notes.append(f"holds {len(groups)} networks, {start}0 to {start}{len(groups) - 1}: each counts as a member")
    return [(f"{start}{number}", group) for number, group in enumerate(groups)], notes


def _at_key(path: Path, value: Any, key: str) -> list[tuple[str, Stored]]:
    is_each = key == "*" or key.endswith(".*")
    names = [name for name in key.removesuffix("*").split(".") if name]
    while names:
        if isinstance(value, list | tuple) and names[0].isdecimal() and int(names[0][:7]) < len(value):
            value = value[int(names[0])]
        elif isinstance(value, Mapping) and names[0] in value and not isinstance(value[names[0]], TENSORS):
            value = value[names[0]]
        else:
            break
        names = names[1:]
    parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if is_each and not names and isinstance(parts, Mapping) and parts and all(map(_has_tensors, parts.values())):
        return [(str(name), _without_prefix(stored_tensors(path, part))) for name, part in parts.items()]
    start = "".join(f"{name}." for name in names)
    tensors = _without_prefix(stored_tensors(path, parts)) if isinstance(parts, Mapping) else {}
    if is_each:
        groups = _numbered({name: one for name, one in tensors.items() if name.startswith(start)}, start)
        if groups is None:
            raise SoupError(f"{path} has no networks of one architecture under '{start}0', '{start}1' and so on")
        return [(f"{start}{number}", group) for number, group in enumerate(groups)]
    inside = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
    if not inside:
        there = f"; there is {_listing(parts)}" if isinstance(parts, Mapping) else ""
        raise SoupError(f"{path} has no tensors under '{key}'{there}: choose another key")
    return [("", inside)]


def stored_tensors(path: Path, state: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """The tensors of a state dict; those that PyTorch mapped into memory are read when a part is asked for."""
    flat = lru_cache(maxsize=1)(lambda tensor: tensor.detach().reshape(-1))  # copies one that is not contiguous
    with file_errors(path, error=SoupError):
        identity = identity_of(path.stat())

    def part(tensor: Tensor, start: int, stop: int) -> Tensor:
        with file_errors(path, error=SoupError):
            is_same = identity_of(path.stat()) == identity
        if not is_same:  # the system would end a process that reads from a mapped file which was truncated
            raise SoupError(f"{path} changed while it was read: start again when nothing writes to it")
        elements: Tensor = flat(tensor)
        return elements[start:stop]

    found = {}
    for name, value in state.items():
        if isinstance(value, StoredTensor):
            found[str(name)] = value
        elif isinstance(value, Tensor):
            kind = type(value).__name__ if type(value) not in (Tensor, nn.Parameter) else ""
            kind = str(value.layout).removeprefix("torch.") if value.layout is not torch.strided else kind
            kind = "quantized" if value.is_quantized else "meta" if value.is_meta else kind
            if kind:
                raise SoupError(f"{path} has '{name}' as a {kind} tensor, expected a dense tensor: save it as such")
            if value.nbytes > max(identity[2], LEAST_LIMIT):
                raise SoupError(
                    f"{path} has '{name}', which repeats its numbers and is larger than the file: save a copy of it"
                )
            found[str(name)] = StoredTensor(TensorInfo.of(value), partial(part, value))
    return found


def _numbered(tensors: Stored, start: str) -> list[dict[str, StoredTensor]] | None:
    """The tensors by the number that follows `start`, if all numbers from 0 on have the same names and shapes."""
    groups: dict[int, dict[str, StoredTensor]] = {}
    for name, value in tensors.items():
        found = re.match(r"(\d{1,6})\.(.+)", name[len(start) :]) if name.startswith(start) else None
        if found is None:
            return None
        groups.setdefault(int(found[1]), {})[found[2]] = value
    if len(groups) < 2 or set(groups) != set(range(len(groups))):
        return None
    infos = [{name: stored.info for name, stored in groups[number].items()} for number in range(len(groups))]
    return [groups[number] for number in range(len(groups))] if all(one == infos[0] for one in infos) else None


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(part, TENSORS) for part in value.values())


def _listing(names: Sequence[Any] | Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(names)[:10])) or "nothing"


def _without_prefix(tensors: Stored) -> dict[str, StoredTensor]:
    """The same tensors under names without the prefixes of data-parallel, averaged and compiled models."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}
    is_wrapped = False
    for prefix in WRAPPER_PREFIXES:
        if kept and all(name.startswith(prefix) for name in kept):
            kept, is_wrapped = {name.removeprefix(prefix): tensor for name, tensor in kept.items()}, True
    return kept if is_wrapped else dict(tensors)
