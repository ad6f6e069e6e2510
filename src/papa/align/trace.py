"""Running a network's graph on labels instead of numbers."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from papa.align.labels import FROZEN, Ledger, compact, tidy, varies


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer as the graph takes it in."""

    name: str
    tensor: Tensor
    is_parameter: bool


@dataclass(frozen=True)
class Labelled:
    """The labels of an activation."""

    labels: Tensor


Within = tuple[int, int] | None
Rule = Callable[["Trace", fx.Node, list[Any], dict[str, Any]], Any]


class Trace:
    """What is known about a network's units while its graph runs; the rules write into it.

    Args:
        leaves: the parameters and buffers by the name of their placeholder.
        rules: what an operator does to labels, by the operator's name.
    """

    def __init__(self, leaves: Mapping[str, Leaf], rules: Mapping[str, Rule]) -> None:
        self.ledger = Ledger()
        self.axes: dict[tuple[str, int, Within], Tensor] = {}
        """The label of each index of a tensor's axis; `within` says for which rows (axis 0) when not for all."""
        self.elements: dict[str, Tensor] = {}
        """The label of each number of a tensor that is used like an activation."""
        self.activations: dict[tuple[str, int, Within], Tensor] = {}
        """The label of each index of a node's dimension, where units vary along one dimension alone."""
        self._leaves = leaves
        self._rules = rules
        self._unruled: dict[str, int] = {}

    def run(self, graph: fx.Graph) -> None:
        """Go through the graph once."""
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = self._leaves.get(node.target) or self._input(node)
            elif node.op == "output":
                for value in pytree.tree_leaves(fx.map_arg(node.args, lambda used: values[used])):
                    if isinstance(value, Labelled | Leaf):
                        self.ledger.freeze(self.labels(value))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: values[used])
                values[node] = self._call(node, list(args), dict(kwargs))
                self._note(node, values[node])
        for name, times in sorted(self._unruled.items()):
            warnings.warn(
                f"operator {name} has no rule (met {times} times): the units it touches stay where they are",
                UserWarning,
                stacklevel=4,
            )

    def _note(self, node: fx.Node, value: Any) -> None:
        if not isinstance(value, Labelled):
            return
        dims = [dim for dim in range(value.labels.dim()) if varies(value.labels, dim)]
        if len(dims) == 1:
            (small,) = compact(value.labels)
            self.activations[node.name, dims[0], None] = small.flatten().clamp(min=FROZEN)

    def _input(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        return Labelled(frozen(value.shape)) if isinstance(value, Tensor) else value

    def _call(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.ledger.next_operator()
        name = name_of(node)
        flat = pytree.tree_leaves((args, kwargs))
        if name == "getitem":
            return args[0][args[1]]
        is_traced = any(
            isinstance(value, Labelled) or (isinstance(value, Leaf) and value.is_parameter) for value in flat
        )
        if not is_traced:
            assert callable(node.target)
            args, kwargs = pytree.tree_map(
                lambda value: value.tensor if isinstance(value, Leaf) else value, (args, kwargs)
            )
            return node.target(*args, **kwargs)
        rule = self._rules.get(name)
        try:
            result = NotImplemented if rule is None else rule(self, node, args, kwargs)
        except (RuntimeError, IndexError, TypeError):  # a form of the operator that its rule did not foresee
            result = NotImplemented
        return self.unruled(node, flat) if result is NotImplemented else result

    def unruled(self, node: fx.Node, flat: list[Any]) -> Any:
        """Freeze all that an operator touches."""
        self._unruled[name_of(node)] = self._unruled.get(name_of(node), 0) + 1
        for value in flat:
            if isinstance(value, Labelled) or (isinstance(value, Leaf) and value.is_parameter):
                self.freeze(value)
        return frozen_like(node.meta["val"])

    def freeze(self, value: Leaf | Labelled) -> None:
        """Nothing of this value may move; a parameter that only this freezes needs no label of its own."""
        if isinstance(value, Labelled):
            self.ledger.freeze(value.labels)
            return
        for axis in range(value.tensor.dim()):
            self.ledger.freeze(self.axis(value, axis))

    def axis(self, leaf: Leaf, axis: int, within: Within = None) -> Tensor:
        """The labels along one axis of a parameter or buffer."""
        key = (leaf.name, axis, within)
        if key not in self.axes:
            self.axes[key] = self.ledger.fresh(leaf.tensor.shape[axis])
        return self.axes[key]

    def labels(self, value: Any) -> Tensor:
        """The labels of an activation, of a parameter used like one, or of known numbers."""
        if isinstance(value, Labelled):
            return value.labels
        if isinstance(value, Leaf) and value.is_parameter:
            return self.leaf_labels(value)
        return self.ledger.constants(torch.as_tensor(value.tensor if isinstance(value, Leaf) else value))

    def leaf_labels(self, leaf: Leaf) -> Tensor:
        """A label for each number of a parameter or buffer."""
        if leaf.tensor.dim() == 1:
            return tidy(self.axis(leaf, 0))
        if leaf.name not in self.elements:
            self.elements[leaf.name] = self.ledger.fresh(leaf.tensor.numel()).view(leaf.tensor.shape)
        return tidy(self.elements[leaf.name])


def name_of(node: fx.Node) -> str:
    """`conv2d` for `aten.conv2d.default`; operators in place go by the name of their plain twin."""
    if node.target is operator.getitem:
        return "getitem"
    target = str(node.target)
    name = target.split(".")[1] if target.startswith("aten.") else target
    return name[:-1] if name.endswith("_") and not name.startswith("_") and name != "copy_" else name


def frozen(shape: torch.Size) -> Tensor:
    """Labels of an activation that stays where it is."""
    return torch.full((), FROZEN, dtype=torch.int64).expand(shape)


def frozen_like(value: Any) -> Any:
    """Labels of whatever an operator gives, all frozen."""
    return pytree.tree_map(lambda part: Labelled(frozen(part.shape)) if isinstance(part, Tensor) else part, value)
