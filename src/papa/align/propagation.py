"""Running an exported graph on labels of units instead of numbers."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from papa.align.unit_labels import FROZEN, Constraints, UncoveredError, compact, tidy, varies


@dataclass(frozen=True)
class StateTensor:
    """A parameter, buffer or constant that the graph takes as an input."""

    name: str
    tensor: Tensor
    is_parameter: bool


@dataclass(frozen=True)
class Labelled:
    """The labels of an activation."""

    labels: Tensor


AxisKey = tuple[str, int, tuple[int, int] | None]
"""A tensor's name, a dimension, and the range of rows if not all (see `TensorAxis`)."""


@dataclass(frozen=True)
class Call:
    """A call of an operator in the graph, with labels in place of activations."""

    node: fx.Node
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def shape(self) -> torch.Size:
        """The shape of the output, if it is one tensor."""
        if not isinstance(self.node.meta["val"], Tensor):
            raise UncoveredError
        return self.node.meta["val"].shape

    @cached_property
    def by_name(self) -> dict[str, Any]:
        """All arguments by their names in the operator's schema, defaults included."""
        arguments = self.node.target._schema.arguments  # type: ignore[union-attr]
        given = dict(zip((argument.name for argument in arguments), self.args, strict=False))
        return {argument.name: argument.default_value for argument in arguments} | given | self.kwargs

    def __getitem__(self, name: str) -> Any:
        """An argument by its name, or None if the operator does not take it."""
        return self.by_name.get(name)


OperatorRule = Callable[["LabelPropagation", Call], Any]
"""Returns the labels of an operator's output and adds to the constraints, or raises `UncoveredError`."""


class LabelPropagation(fx.Interpreter):
    """An interpreter that propagates labels and collects the constraints of all operators."""

    def __init__(
        self, module: fx.GraphModule, state: Mapping[str, StateTensor], rules: Mapping[str, OperatorRule]
    ) -> None:
        super().__init__(module)
        self.constraints = Constraints()
        self.axes: dict[AxisKey, Tensor] = {}
        """The label of each index along an axis of a parameter or buffer."""
        self.elements: dict[str, Tensor] = {}
        """The label of each number of a parameter that is used like an activation."""
        self.activations: dict[AxisKey, Tensor] = {}
        """The label of each index along a dimension of a node's output, if labels vary along this dimension only."""
        self.unsupported: Counter[str] = Counter()
        """Operators without a rule, and how often the graph calls each."""
        self._state, self._rules = state, rules

    def run_node(self, node: fx.Node) -> Any:
        """The labels of a node's output; what does not depend on parameters or inputs is computed."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            activation = Labelled(_frozen(value.shape)) if isinstance(value, Tensor) else value
            return self._state.get(str(node.target), activation)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            for value in pytree.tree_leaves(args):
                if isinstance(value, Labelled | StateTensor):
                    self.constraints.freeze(self.labels(value))
            return args
        result = self._call(node, list(args), dict(kwargs))
        if isinstance(result, Labelled):
            dims = [dim for dim in range(result.labels.dim()) if varies(result.labels, dim)]
            if len(dims) == 1:
                (small,) = compact(result.labels)
                self.activations[node.name, dims[0], None] = small.flatten().clamp(min=FROZEN)
        return result

    def _call(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.constraints.next_operator()
        name = operator_name(node)
        if name == "getitem":
            return args[0][args[1]]
        flat = pytree.tree_leaves((args, kwargs))
        traced = [value for value in flat if isinstance(value, Labelled) or is_parameter(value)]
        if not traced:
            assert callable(node.target)
            args, kwargs = pytree.tree_map(
                lambda value: value.tensor if isinstance(value, StateTensor) else value, (args, kwargs)
            )
            return node.target(*args, **kwargs)
        if name in self._rules:
            try:
                return self._rules[name](self, Call(node, args, kwargs))
            except (RuntimeError, IndexError, TypeError):
                pass  # UncoveredError, or an argument that the rule does not expect
        self.unsupported[name] += 1
        for value in traced:
            self.freeze(value)
        return pytree.tree_map(
            lambda part: Labelled(_frozen(part.shape)) if isinstance(part, Tensor) else part, node.meta["val"]
        )

    def freeze(self, value: StateTensor | Labelled) -> None:
        """Keep all units of a value in their place."""
        if isinstance(value, Labelled):
            self.constraints.freeze(value.labels)
        else:
            for dim in range(value.tensor.dim()):
                self.constraints.freeze(self.axis(value, dim))

    def axis(self, state: StateTensor, dim: int, row_range: tuple[int, int] | None = None) -> Tensor:
        """The labels along one axis of a parameter or buffer."""
        key = (state.name, dim, row_range)
        if key not in self.axes:
            self.axes[key] = self.constraints.new_units(state.tensor.shape[dim])
        return self.axes[key]

    def labels(self, value: Any) -> Tensor:
        """The labels of an activation, of a parameter that is used like one, or of known numbers."""
        if isinstance(value, Labelled):
            return value.labels
        if not isinstance(value, StateTensor):
            return self.constraints.constants(torch.as_tensor(value))
        if not value.is_parameter:
            return self.constraints.constants(value.tensor)
        if value.tensor.dim() == 1:
            return tidy(self.axis(value, 0))
        if value.name not in self.elements:
            self.elements[value.name] = self.constraints.new_units(value.tensor.numel()).view(value.tensor.shape)
        return tidy(self.elements[value.name])


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter of the network, unchanged."""
    return isinstance(value, StateTensor) and value.is_parameter


def operator_name(node: fx.Node) -> str:
    """`conv2d` for `aten.conv2d.default`; an in-place operator has the name of the operator that is not."""
    if node.target is operator.getitem:
        return "getitem"
    target = str(node.target)
    name = target.split(".")[1] if target.startswith("aten.") else target
    return name[:-1] if name.endswith("_") and not name.startswith("_") and name != "copy_" else name


def _frozen(shape: torch.Size) -> Tensor:
    return torch.full((), FROZEN, dtype=torch.int64).expand(shape)
