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

from papa.checkpoint.tensors import Spec
from papa.errors import RunError

MemberState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""All of a member's tensors by name, and what else belongs to it as a JSON value."""


def member_state(model: nn.Module, optimizer: Optimizer) -> MemberState:
    """All of a member's state, as named tensors and a JSON value."""
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
    """What a member's state must look like to fit a network and its optimizer.

    Which tensors an optimizer keeps shows only once it took a step, so a copy of it takes one, without numbers where
    it can. A parameter that has not been trained yet, such as a frozen one, may have none of them.

    Args:
        model: the member.
        optimizer: its optimizer.
        in_flight: tensors like those that averaging may have under way, by name; there or not.
        callbacks: tensors like those that callbacks keep for it, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        in_flight: Mapping[str, Tensor] | None = None,
        callbacks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.in_flight = {f"averager.{name}": _spec(tensor) for name, tensor in (in_flight or {}).items()}
        state = model.state_dict()
        self.model: dict[str, Spec] = {
            **{f"model.{name}": _spec(tensor) for name, tensor in state.items()},
            **{f"callbacks.{name}": _spec(tensor) for name, tensor in (callbacks or {}).items()},
        }
        values = _optimizer_after_a_step(optimizer)
        self.optimizer = {key: _spec(value) if isinstance(value, Tensor) else value for key, value in values.items()}

    def check_tensors(self, specs: Mapping[str, Spec]) -> None:
        """Raise a `RunError` that names the first tensor that differs."""
        for name in self.model.keys() | specs.keys():
            expected = self.model.get(name) or self.in_flight.get(name)
            if name.startswith("optimizer."):
                value = self.optimizer.get(name.removeprefix("optimizer."))
                expected = value if isinstance(value, tuple) else None
            if specs.get(name) != expected:
                found, wanted = _described(specs.get(name)), _described(expected)
                raise RunError(f"its tensor '{name}' is {found}, expected {wanted}: it is of another model")

    def check_numbers(self, numbers: Any) -> None:
        """Raise a `RunError` unless these are numbers that the optimizer keeps."""
        if not isinstance(numbers, dict):
            raise RunError(f"its optimizer's numbers are {numbers!r}, expected an object")
        for key, value in numbers.items():
            expected = self.optimizer.get(key)
            is_number = type(value) in (int, float, bool) and math.isfinite(value)
            if not is_number or isinstance(expected, tuple) or expected is None:
                raise RunError(
                    f"its optimizer has {value!r} as '{key}', which does not fit: it is of another optimizer"
                )

    def check_whole(self, tensors: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Raise a `RunError` where a parameter has some of its optimizer's values and not all."""
        found = {name.removeprefix("optimizer.") for name in tensors if name.startswith("optimizer.")} | numbers.keys()
        begun = {key.partition(".")[0] for key in found}
        for key, value in self.optimizer.items():
            if key.partition(".")[0] in begun and key not in found and value is not None:
                wanted = _described(value) if isinstance(value, tuple) else "a number"
                raise RunError(f"its optimizer has no '{key}', expected {wanted}")


def _optimizer_after_a_step(optimizer: Optimizer) -> dict[str, Any]:
    """What it keeps then; on the meta device, where tensors have shapes and take no memory, if it can step there."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(parameter): nn.Parameter(parameter.detach().to("meta")) for parameter in parameters}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(optimizer, memo)
    for group in twin.param_groups:
        if group.get("fused"):
            group["fused"] = False  # which keeps the same, and is not made for the meta device
    try:
        return _after_a_step(twin)
    except RuntimeError:  # it looks at numbers, which are not there; what else is wrong shows again
        return _after_a_step(copy.deepcopy(optimizer))


def _after_a_step(twin: Optimizer) -> dict[str, Any]:
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.requires_grad_(True)
            parameter.grad = torch.zeros_like(parameter)
    twin.step()
    return _optimizer_values(twin)


def _spec(tensor: Tensor) -> Spec:
    return tensor.dtype, tuple(tensor.shape)


def _described(spec: Spec | None) -> str:
    return "missing" if spec is None else f"{spec[0]} of shape {spec[1]}"


def load_member_state_(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Put `member_state` back into a member and its optimizer; learning rates stay as they are.

    What is put back is taken out of `tensors`, so that no more than one copy is held.
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
        entries.setdefault(int(index), {})[name] = _in_order_of(parameters[int(index)], value)
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def _in_order_of(parameter: Tensor, value: Any) -> Any:
    """The value in the parameter's memory order, which files do not keep and fused optimizer kernels need."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return value
