"""A member's state as named tensors and numbers, and back."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.errors import RunError
from papa.storage import TensorInfo

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
    parameter that was not trained yet, such as a frozen one, may have no optimizer state.

    Args:
        model: the member.
        optimizer: its optimizer.
        pending: tensors like those of an averaging that is not finished yet, by name; they may be missing.
        callbacks: tensors like those that callbacks keep for the member, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        pending: Mapping[str, Tensor] | None = None,
        callbacks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.optional = {f"averager.{name}": TensorInfo.of(tensor) for name, tensor in (pending or {}).items()}
        self.required = {
            **{f"model.{name}": TensorInfo.of(tensor) for name, tensor in model.state_dict().items()},
            **{f"callbacks.{name}": TensorInfo.of(tensor) for name, tensor in (callbacks or {}).items()},
        }
        self.optimizer = {
            key: TensorInfo.of(value) if isinstance(value, Tensor) else value
            for key, value in _values_after_a_step(optimizer).items()
        }

    def check(self, tensors: Mapping[str, TensorInfo], numbers: Any) -> None:
        """Raise a `RunError` that names the first difference.

        Args:
            tensors: the dtype and shape of each tensor of a checkpoint.
            numbers: the optimizer's numbers in it.
        """
        self._check_tensors(tensors)
        if not isinstance(numbers, dict):
            raise RunError(f"its optimizer's numbers are {numbers!r}, expected an object")
        for key, value in numbers.items():
            is_number = type(value) in (int, float, bool) and math.isfinite(value)
            if not is_number or self.optimizer.get(key) is None or isinstance(self.optimizer[key], TensorInfo):
                raise RunError(f"its optimizer has {value!r} as '{key}': it is of another optimizer")
        self._check_complete({_optimizer_key(name) for name in tensors} | numbers.keys())

    def _check_tensors(self, tensors: Mapping[str, TensorInfo]) -> None:
        for name in self.required.keys() | tensors.keys():
            expected = self.required.get(name) or self.optional.get(name)
            if (key := _optimizer_key(name)) is not None:
                value = self.optimizer.get(key)
                expected = value if isinstance(value, TensorInfo) else None
            if tensors.get(name) != expected:
                found, wanted = (info or "missing" for info in (tensors.get(name), expected))
                raise RunError(f"its tensor '{name}' is {found}, expected {wanted}: it is of another model")

    def _check_complete(self, found: set[str | None]) -> None:
        """A parameter has all of its optimizer's values or none."""
        begun = {key.partition(".")[0] for key in found if key is not None}
        for key, value in self.optimizer.items():
            if key.partition(".")[0] in begun and key not in found and value is not None:
                wanted = value if isinstance(value, TensorInfo) else "a number"
                raise RunError(f"its optimizer has no '{key}', expected {wanted}")


def _optimizer_key(name: str) -> str | None:
    return name.removeprefix("optimizer.") if name.startswith("optimizer.") else None


def _values_after_a_step(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps after a step; on the meta device, where tensors take no memory, if it can step there."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(parameter): nn.Parameter(parameter.detach().to("meta")) for parameter in parameters}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(optimizer, memo)
    for group in twin.param_groups:
        if group.get("fused"):
            group["fused"] = False  # it keeps the same values, and has no kernel for the meta device
    try:
        return _stepped(twin)
    except RuntimeError:  # it reads numbers, which meta tensors do not have; any other error occurs again
        return _stepped(copy.deepcopy(optimizer))


def _stepped(optimizer: Optimizer) -> dict[str, Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
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
    state = {key.removeprefix("model."): tensors.pop(key) for key in list(tensors) if key.startswith("model.")}
    model.load_state_dict(state)
    state.clear()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries: dict[int, dict[str, Any]] = {}
    kept = {key: None for key in tensors if key.startswith("optimizer.")}
    for key in [*kept, *(f"optimizer.{key}" for key in numbers["optimizer"])]:
        _, index, name = key.split(".", 2)
        value = tensors.pop(key) if key in kept else numbers["optimizer"][f"{index}.{name}"]
        entries.setdefault(int(index), {})[name] = _in_memory_format_of(parameters[int(index)], value)
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def _in_memory_format_of(parameter: Tensor, value: Any) -> Any:
    """The value in the parameter's memory format, which files do not keep and fused optimizer kernels need."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return value
