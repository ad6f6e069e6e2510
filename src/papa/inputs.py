"""What a network takes in a batch: one tensor, or several by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from papa.errors import DataError

Inputs: TypeAlias = Any
"""A tensor whose first axis counts examples, or a mapping from names to such tensors."""


def outputs_of(model: Callable[..., Any], inputs: Inputs) -> Any:
    """What a network makes of its inputs.

    Tensors by name go by keyword where its `forward` has arguments of all these names, and as its one argument else.

    Example:
        >>> class Scaled(nn.Module):
        ...     def forward(self, words, mask=None):
        ...         return words if mask is None else words * mask
        >>> import torch
        >>> outputs_of(Scaled(), {"words": torch.tensor([1, 2]), "mask": torch.tensor([1, 0])})
        tensor([1, 0])
    """
    if isinstance(inputs, Mapping) and inputs.keys() <= _arguments_of(model):
        return model(**inputs)
    return model(inputs)


def _arguments_of(model: Callable[..., Any]) -> set[str]:
    """The names of what a network's `forward` takes; of one that only passes on what it gets, of the one inside."""
    within = model._modules if isinstance(model, nn.Module) else {}
    inside = next((within[name] for name in ("module", "_orig_mod") if name in within), None)
    parameters = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    if inside is not None and any(one.kind == one.VAR_KEYWORD for one in parameters):
        return _arguments_of(inside)
    return {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def inputs_of(batch: Any) -> Inputs:
    """A batch's inputs: the batch itself, or the first entry of a tuple."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def parts_of(inputs: Any) -> list[Any]:
    """The one thing that inputs are, or all that they have by name."""
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def are_inputs(inputs: Any) -> bool:
    """Whether something is a tensor, or tensors by name."""
    return len(parts_of(inputs)) > 0 and all(isinstance(part, Tensor) for part in parts_of(inputs))


def num_examples(inputs: Inputs) -> int:
    """How many examples inputs have: of several tensors, all as many."""
    if not are_inputs(inputs):
        raise DataError(f"a batch is a {type(inputs).__name__}, expected a tensor, or tensors by name")
    if not isinstance(inputs, Mapping):
        return len(inputs)
    found = {name: len(part) for name, part in inputs.items()}
    if len(set(found.values())) > 1:
        lengths = ", ".join(f"'{name}' {length}" for name, length in found.items())
        raise DataError(f"inputs have different numbers of examples: {lengths}")
    return next(iter(found.values()))


def each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with their tensor, or every one of their tensors, changed.

    Example:
        >>> import torch
        >>> each({"words": torch.tensor([1, 2])}, lambda part: part + 1)
        {'words': tensor([2, 3])}
    """
    if isinstance(inputs, Mapping):
        return {name: change(part) for name, part in inputs.items()}
    return change(inputs)
