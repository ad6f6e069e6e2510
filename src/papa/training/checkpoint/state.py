"""A member's state as named tensors and numbers, and back."""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.errors import RunError
from papa.storage.tensors import TensorInfo

MemberState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""All tensors of a member by name, and the rest of its state as a JSON value."""


def member_state(model: nn.Module, optimizer: Optimizer) -> MemberState:
    """The state of a member and its optimizer, as named tensors and a JSON value."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    numbers: dict[str, Any] = {}
    for key, value in _optimizer_values(optimizer).items():
        if isinstance(value, Tensor):
            tensors[f"optimizer.{key}"] = value.detach()
        elif value is not None:
            numbers[key] = value
    return tensors, {"optimizer": numbers}


def _optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entries in state.items() for name, value in entries.items()}


class Expected:
    """The tensors and numbers that a checkpoint of a member must have.

    What an optimizer keeps is known only after a step, so a copy of it takes one, on the meta device where possible. A
    parameter that was not trained yet, such as a frozen one, may have no optimizer state. `averager` has tensors like
    those of an averaging that is not finished yet, which may be missing; `callbacks` those that callbacks keep.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        averager: Mapping[str, Tensor] | None = None,
        callbacks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.optimizer = {
            key: TensorInfo.of(value) if isinstance(value, Tensor) else "a number"
            for key, value in _values_after_a_step(optimizer).items()
            if value is not None
        }
        self.required = _infos("model", model.state_dict()) | _infos("callbacks", callbacks or {})
        kept = {f"optimizer.{key}": info for key, info in self.optimizer.items() if isinstance(info, TensorInfo)}
        self.known = self.required | _infos("averager", averager or {}) | kept

    def check(self, tensors: Mapping[str, TensorInfo], numbers: Any) -> None:
        """Raise a `RunError` that names the first difference to a checkpoint's tensors and its optimizer's numbers."""
        for name in self.required.keys() | tensors.keys():
            if tensors.get(name) != self.known.get(name):
                found, wanted = (infos.get(name, "missing") for infos in (tensors, self.known))
                raise RunError(f"its tensor '{name}' is {found}, expected {wanted}: it is of another model")
        if not isinstance(numbers, dict):
            raise RunError(f"its optimizer's numbers are {numbers!r}, expected an object")
        for key, value in numbers.items():
            is_number = type(value) in (int, float, bool) and math.isfinite(value)
            if not is_number or self.optimizer.get(key) != "a number":
                raise RunError(f"its optimizer has {value!r} as '{key}': it is of another optimizer")
        kept = {name.removeprefix("optimizer.") for name in tensors if name.startswith("optimizer.")} | numbers.keys()
        begun = {key.partition(".")[0] for key in kept}  # a parameter has all of its optimizer's values or none
        for key, expected in self.optimizer.items():
            if key not in kept and key.partition(".")[0] in begun:
                raise RunError(f"its optimizer has no '{key}', expected {expected}")


def _infos(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {f"{prefix}.{name}": TensorInfo.of(tensor) for name, tensor in tensors.items()}


def _values_after_a_step(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps after a step; on the meta device, where tensors take no memory, if it can step there."""
    memo: dict[int, Any] = {id(one): nn.Parameter(one.detach().to("meta")) for one in _parameters(optimizer)}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(optimizer, memo)
    for group in twin.param_groups:
        if group.get("fused"):
            group["fused"] = False  # it keeps the same values, and has no kernel for the meta device
    try:
        return _stepped(twin)
    except RuntimeError:  # it reads numbers, which meta tensors do not have; any other error occurs again
        return _stepped(copy.deepcopy(optimizer))


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _stepped(optimizer: Optimizer) -> dict[str, Any]:
    for parameter in _parameters(optimizer):
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return _optimizer_values(optimizer)


def load_member_state_(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Load a `member_state` into a member and its optimizer; learning rates do not change.

    Tensors that were loaded are removed from `tensors`, so that there is never more than one copy.
    """

    def pop(prefix: str) -> Iterator[tuple[str, Tensor]]:
        return ((key.removeprefix(prefix), tensors.pop(key)) for key in list(tensors) if key.startswith(prefix))

    model.load_state_dict(dict(pop("model.")))
    parameters = _parameters(optimizer)
    entries: dict[int, dict[str, Any]] = {}
    for key, value in itertools.chain(pop("optimizer."), numbers["optimizer"].items()):
        index, name = key.split(".", 1)
        entries.setdefault(int(index), {})[name] = _in_memory_format_of(parameters[int(index)], value)
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def _in_memory_format_of(parameter: Tensor, value: Any) -> Any:
    """The value in the parameter's memory format, which files do not keep and fused optimizer kernels need."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return value
