"""Inputs of a network: one tensor, tensors by name, such as `{"words": ..., "mask": ...}`, or several in a tuple."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from papa.errors import DataError

Inputs: TypeAlias = Any
"""A tensor with one row per example, a mapping from names to such tensors, or a tuple of them; targets too."""

LABELS = ("labels", "label", "targets", "target")
"""The names under which an example that is a dictionary may hold its target."""


def outputs_of(model: Callable[..., Any], inputs: Inputs) -> Any:
    """The outputs of a network for its inputs.

    A mapping is passed as keyword arguments if `forward` has all its names as arguments, otherwise as one argument; a
    tuple as several arguments.

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
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def logits_of(outputs: Any) -> Any:
    """The tensor that a loss and a metric are computed from: the outputs, or their `logits`, as of transformers."""
    if isinstance(outputs, Tensor):
        return outputs
    return (
        outputs["logits"]
        if isinstance(outputs, Mapping) and "logits" in outputs
        else getattr(outputs, "logits", outputs)
    )


def own_loss_of(model: Callable[..., Any], inputs: Inputs, targets: Any) -> tuple[Any, Any]:
    """The outputs of a network, and the `loss` that it computes itself if its `forward` takes labels; else None."""
    name = next((name for name in LABELS if isinstance(inputs, Mapping) and name in _argument_names(model)), None)
    if name is None:
        return outputs_of(model, inputs), None
    outputs = outputs_of(model, {**inputs, name: targets})
    return outputs, getattr(outputs, "loss", None)


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
    """The values of a mapping or tuple, or the inputs themselves in a list."""
    if isinstance(inputs, tuple):
        return list(inputs)
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def are_inputs(inputs: Any) -> bool:
    """Whether the value is a tensor, or a non-empty mapping or tuple of tensors."""
    return len(tensors_in(inputs)) > 0 and all(isinstance(part, Tensor) for part in tensors_in(inputs))


def num_examples(inputs: Inputs) -> int:
    """The number of examples, which must be the same in all tensors."""
    if not are_inputs(inputs):
        raise DataError(f"a batch is a {type(inputs).__name__}, expected a tensor, or tensors by name or in a tuple")
    if isinstance(inputs, Tensor):
        return len(inputs)
    named = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    lengths = {name: len(part) for name, part in named}
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
    return tuple(map(change, inputs)) if isinstance(inputs, tuple) else change(inputs)


def as_batch(found: Any, subject: str) -> tuple[Inputs, Any]:
    """Inputs and targets of what a dataset gave, collated; `subject` is where it is from, for errors.

    A pair is (inputs, targets). Of a longer tuple the last is the targets, and of a dictionary that under one of
    `LABELS`.
    """
    pair: tuple[Any, Any] | None = None
    if isinstance(found, Mapping):
        name = next((name for name in LABELS if name in found), None)
        if name is not None:
            pair = {key: value for key, value in found.items() if key != name}, found[name]
    elif isinstance(found, (tuple, list)) and len(found) >= 2:
        pair = found[0] if len(found) == 2 else tuple(found[:-1]), found[-1]
    if pair is None or not (are_inputs(pair[0]) and are_inputs(pair[1])):
        parts = f" of {len(found)}" if isinstance(found, (tuple, list, Mapping)) else ""
        kind = "tuple" if isinstance(found, list) else type(found).__name__  # as which tuples are collated
        raise DataError(
            f"an example of {subject} is a {kind}{parts}, expected a pair of inputs and target, inputs "
            f"and last the target, or a dictionary with the target under {' or '.join(LABELS)}; each a tensor or a "
            "number, or tensors by name: wrap the dataset in one that gives these, or collate them so"
        )
    return pair
