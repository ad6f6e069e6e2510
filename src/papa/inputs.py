"""Inputs of a network: one tensor, or a mapping from names to tensors, such as `{"words": ..., "mask": ...}`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from papa.errors import DataError

Inputs: TypeAlias = Any
"""A tensor with one row per example, or a mapping from names to such tensors."""


def outputs_of(model: Callable[..., Any], inputs: Inputs) -> Any:
    """The outputs of a network for its inputs.

    A mapping is passed as keyword arguments if `forward` has all its names as arguments, otherwise as one argument.

    Example:
        >>> class Scaled(nn.Module):
        ...     def forward(self, words, mask=None):
        ...         return words if mask is None else words * mask
        >>> import torch
        >>> outputs_of(Scaled(), {"words": torch.tensor([1, 2]), "mask": torch.tensor([1, 0])})
        tensor([1, 0])
    """
    if isinstance(inputs, Mapping) and inputs.keys() <= _argument_names(model):
        return model(**inputs)
    return model(inputs)


def _argument_names(model: Callable[..., Any]) -> set[str]:
    """The argument names of `forward`; for wrappers that pass on **kwargs (DDP, compile), of the wrapped module."""
    children = model._modules if isinstance(model, nn.Module) else {}
    wrapped = next((children[name] for name in ("module", "_orig_mod") if name in children), None)
    parameters = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    if wrapped is not None and any(one.kind == one.VAR_KEYWORD for one in parameters):
        return _argument_names(wrapped)
    return {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def inputs_of(batch: Any) -> Inputs:
    """The inputs of a batch: the first entry of a tuple or list, otherwise the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def tensors_in(inputs: Any) -> list[Any]:
    """The values of a mapping, or the inputs themselves in a list."""
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def are_inputs(inputs: Any) -> bool:
    """Whether the value is a tensor or a non-empty mapping to tensors."""
    return len(tensors_in(inputs)) > 0 and all(isinstance(part, Tensor) for part in tensors_in(inputs))


def num_examples(inputs: Inputs) -> int:
    """The number of examples, which must be the same in all tensors."""
    if not are_inputs(inputs):
        raise DataError(f"a batch is a {type(inputs).__name__}, expected a tensor, or tensors by name")
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {name: len(part) for name, part in inputs.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
        raise DataError(f"inputs have different numbers of examples: {listed}")
    return next(iter(lengths.values()))


def each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to the tensor, or to each tensor of the mapping.

    Example:
        >>> import torch
        >>> each({"words": torch.tensor([1, 2])}, lambda part: part + 1)
        {'words': tensor([2, 3])}
    """
    if isinstance(inputs, Mapping):
        return {name: change(part) for name, part in inputs.items()}
    return change(inputs)
