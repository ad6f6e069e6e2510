"""Running an exported graph on labels of units instead of numbers, and the constraints that its operators put on them.

A label tensor has the shape of the activation or parameter that it describes. Each entry is an integer:

- positive: the unit that this number belongs to;
- 0 (`FROZEN`): the number must stay in its place, as inputs and outputs of the network must;
- negative: a constant, which no permutation changes; equal constants have equal labels.

Labels that an operator joins are one unit, as the two operands of an addition. Dimensions along which labels do not
vary have stride 0 (see `tidy`), which keeps label tensors small.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.utils import _pytree as pytree

FROZEN = 0
"""The label of everything that must stay in its place."""

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


def tidy(labels: Tensor) -> Tensor:
    """The same labels, with stride 0 along every dimension on which they do not vary."""
    shape = labels.shape
    if labels.numel() == 0:
        return labels
    for dim in range(labels.dim()):
        first = labels.narrow(dim, 0, 1)
        if labels.shape[dim] > 1 and (labels.stride(dim) == 0 or bool((labels == first).all())):
            labels = first
    return labels.expand(shape)


def varies(labels: Tensor, dim: int) -> bool:
    """Whether tidy labels differ along a dimension."""
    return labels.shape[dim] > 1 and labels.stride(dim) != 0


def compact(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape, cut to length 1 along the dimensions on which none of them varies."""
    found = list(tensors)
    for dim in range(tensors[0].dim()):
        if not any(varies(tensor, dim) for tensor in tensors):
            found = [tensor.narrow(dim, 0, min(1, tensor.shape[dim])) for tensor in found]
    return found


def as_rows(labels: Tensor, dims: Sequence[int]) -> Tensor:
    """A matrix with `dims` along its columns and one row for each index of the other dimensions."""
    columns = [dim % labels.dim() for dim in dims]
    kept = [dim for dim in range(labels.dim()) if dim not in columns]
    lines: Tensor = torch.permute(labels, [*kept, *columns])
    return lines.reshape(math.prod(lines.shape[: len(kept)]), -1)


def joint_shape(*shapes: torch.Size) -> torch.Size:
    """The shape that these broadcast to."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _compact_broadcast(*tensors: Tensor) -> list[Tensor]:
    return compact(*torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def hashed(*numbers: Integers | int) -> Integers:
    """An elementwise 64-bit hash of several integers."""
    total = np.asarray(0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            total = (total ^ np.asarray(number).astype(np.int64).view(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            total = (total ^ (total >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            total = total ^ (total >> np.uint64(32))
    return np.asarray(total).view(np.int64)


def rank_among_equal(keys: Integers) -> tuple[Integers, Integers]:
    """A stable order that sorts `keys`, and each sorted entry's rank among those equal to it."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(keys)])
    return order, np.arange(len(keys)) - np.repeat(starts, lengths)


class UncoveredError(RuntimeError):
    """A use of an operator that its rule does not cover: the units it touches stay in place."""


class Constraints:
    """All labels of a network, and what its operators require of them."""

    def __init__(self) -> None:
        self.count = 1
        """The number of labels, `FROZEN` included."""
        self.edges: list[Integers] = []
        """Pairs of labels that are one unit."""
        self.sets: list[tuple[int, Integers]] = []
        """The number of an operator, and a matrix: the operator treats the units of each row as a set."""
        self.colours: list[tuple[Integers, Integers]] = []
        """Labels and their colours: units of different colours are not exchangeable."""
        self._constants: dict[Any, int] = {}
        self._operator = 0

    def next_operator(self) -> None:
        """Colours and sets from now on belong to the next operator."""
        self._operator += 1

    def new_units(self, number: int) -> Tensor:
        """The labels of new units."""
        self.count += number
        return torch.arange(self.count - number, self.count, device="cpu")

    def constant(self, key: Any) -> int:
        """The label of the constant with this key."""
        return self._constants.setdefault(key, -1 - len(self._constants))

    def constants(self, values: Tensor) -> Tensor:
        """The labels of known numbers: equal numbers have equal labels."""
        distinct, inverse = torch.unique(values.detach().double(), return_inverse=True)
        ids = torch.tensor([self.constant(value) for value in distinct.tolist()], dtype=torch.int64, device="cpu")
        return tidy(ids[inverse].reshape(values.shape))

    def join(self, first: Tensor, second: Tensor) -> None:
        """Labels in the same place are one unit; a constant on either side freezes the other."""
        pairs = torch.stack([part.flatten() for part in _compact_broadcast(first, second)])
        self.edges.append(np.unique(pairs.clamp(min=FROZEN).numpy(), axis=1))

    def freeze(self, labels: Tensor) -> None:
        """These units stay in their place."""
        self.join(labels, torch.zeros((), dtype=torch.int64, device="cpu"))

    def colour(self, labels: Tensor, values: Tensor) -> None:
        """Units are exchangeable only if this operator gives them the same sequence of values."""
        labels, values = (part.flatten() for part in _compact_broadcast(labels, values))
        is_unit = labels >= 0
        units, seen = labels[is_unit].numpy(), values[is_unit].numpy()
        order, rank = rank_among_equal(units)
        self.colours.append((units[order], hashed(self._operator, rank, seen[order])))

    def mark(self, labels: Tensor) -> None:
        """Units that pass through this operator are exchangeable only with others that do."""
        (small,) = compact(labels)
        units = np.unique(small.numpy())
        units = units[units >= 0]
        self.colours.append((units, hashed(self._operator, np.full_like(units, -2))))

    def add_sets(self, rows: Tensor) -> Tensor:
        """Each row is a set to this operator: units may move within a row, and whole rows may trade places.

        Returns, for every row, which of the distinct rows it is.
        """
        distinct, inverse = torch.unique(rows, dim=0, return_inverse=True)
        self.sets.append((self._operator, distinct.numpy()))
        which: Tensor = inverse
        return which

    def unit_per_set(self, rows: Tensor, which: Tensor) -> Tensor:
        """A new unit for each distinct row, which moves with the units of its row."""
        made = self.new_units(int(which.max()) + 1)
        if len(made) > 1:
            self.add_sets(torch.cat([rows, made[which][:, None]], dim=1))
        return made[which]

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """The labels of an elementwise operator's output, with broadcasting: units in the same place are joined."""
        shape = joint_shape(first.shape, second.shape)
        wide = [part[(None,) * (len(shape) - part.dim())] for part in (first, second)]
        shared = [
            [dim for dim in range(len(shape)) if mine.shape[dim] == 1 and varies(other, dim)]
            for mine, other in (wide, wide[::-1])
        ]
        first, second = (part.expand(shape) for part in wide)
        some, others = compact(first, second)
        if bool((some >= 0).any()) and bool((others >= 0).any()) and (shared[0] or shared[1]):
            self._share(some, others, shared)
            return second if shared[0] else first
        both = (some >= 0) & (others >= 0)
        if bool(both.any()):
            self.join(some[both], others[both])
        for mine, other in ((some, others), (others, some)):
            chosen = (mine >= 0) & (other < 0)
            if bool(chosen.any()):
                self.colour(mine[chosen], other[chosen])
        found = torch.where(some >= 0, some, others)
        neither = (some < 0) & (others < 0)
        if bool(neither.any()):
            pairs, inverse = torch.unique(torch.stack([some[neither], others[neither]]), dim=1, return_inverse=True)
            ids = [self.constant(("both", self.count, *pair)) for pair in pairs.T.tolist()]
            found[neither] = torch.tensor(ids, device="cpu")[inverse]
        return tidy(found.expand(shape))

    def _share(self, some: Tensor, others: Tensor, shared: list[list[int]]) -> None:
        """One number is broadcast to many units: together they are a set."""
        if (shared[0] and shared[1]) or bool((some < 0).any()) or bool((others < 0).any()):
            raise UncoveredError("an outer product of units, or constants among units that share a number")
        few, many, dims = (some, others, shared[0]) if shared[0] else (others, some, shared[1])
        self.add_sets(torch.cat([as_rows(many, dims), as_rows(few, dims)[:, :1]], dim=1))


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
            return self.constraints.constants(torch.as_tensor(value, device="cpu"))
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
    return torch.full((), FROZEN, dtype=torch.int64, device="cpu").expand(shape)
