"""What each operator does to labels: data movement, elementwise operators, pooling and reductions.

Every rule has the arguments `(graph, node, args, kwargs)` and returns the labels of the operator's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from papa.align.layer_operators import LAYERS
from papa.align.propagation import Labelled, LabelPropagation, OperatorRule, StateTensor
from papa.align.unit_labels import UncoveredError, as_rows, compact, tidy, varies

MOVES = """view reshape _unsafe_view permute transpose t numpy_T mT adjoint cat concat stack chunk split
split_with_sizes unbind slice select flatten unflatten expand expand_as squeeze unsqueeze pixel_shuffle
pixel_unshuffle channel_shuffle roll flip repeat repeat_interleave index_select narrow movedim swapaxes tile diagonal
unfold index view_as unsafe_split unsafe_chunk tensor_split hstack vstack"""
"""Operators that only move numbers: they run on the labels themselves."""

POINTWISE = """relu relu6 hardtanh gelu silu sigmoid tanh elu selu leaky_relu hardswish hardsigmoid softplus
mish celu log_sigmoid softsign exp log log1p expm1 sqrt rsqrt square abs neg sign sin cos erf reciprocal clamp clamp_min
clamp_max floor round dropout feature_dropout alpha_dropout contiguous clone detach alias lift_fresh_copy to _to_copy
type_as nan_to_num rsub logical_not threshold softshrink hardshrink"""
"""Operators that apply one function to every number of one activation."""

ELEMENTWISE = """add sub mul div maximum minimum where pow true_divide addcmul lerp atan2 eq ne gt lt
ge le logical_and logical_or bitwise_and bitwise_or masked_fill"""
"""Operators that combine several activations number by number."""

SPATIAL = """max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa"""
"""Operators that combine numbers within a channel."""

REDUCTIONS = "mean sum amax amin linalg_vector_norm norm var std logsumexp prod"
"""Operators that reduce dimensions by a function that ignores the order of its arguments."""


def move(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the labels."""
    is_index = node.name.startswith("index")

    def labels(value: Any) -> Any:
        if isinstance(value, Labelled):
            return value.labels
        if isinstance(value, StateTensor) or (isinstance(value, Tensor) and not is_index):
            return graph.labels(value)
        return value

    args, kwargs = pytree.tree_map(labels, (args, kwargs))
    if "view.default" in str(node.target):
        result = args[0].reshape(args[1])  # labels may have other strides than the activation
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    return pytree.tree_map(lambda part: Labelled(tidy(part)) if isinstance(part, Tensor) else part, result)


def pointwise(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Labels stay; constants become other constants."""
    labels = graph.labels(args[0])
    if any(isinstance(value, Tensor | StateTensor) for value in args[1:]) and node.name.startswith(("clamp", "rsub")):
        raise UncoveredError
    graph.constraints.mark(labels)
    return Labelled(_with_new_constants(graph, node, labels))


def _with_new_constants(graph: LabelPropagation, node: fx.Node, labels: Tensor) -> Tensor:
    """The labels after an operator that changed the values of constants."""
    (small,) = compact(labels)
    if not bool((small < 0).any()):
        return labels
    distinct, inverse = torch.unique(small, return_inverse=True)
    new = [graph.constraints.constant((node.name, label)) if label < 0 else label for label in distinct.tolist()]
    return tidy(torch.tensor(new)[inverse].expand(labels.shape))


def elementwise(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Units of all operands in one place are one unit."""
    operands = [value for value in args if isinstance(value, Labelled | StateTensor | Tensor)]
    found = graph.labels(operands[0])
    for operand in operands[1:]:
        found = graph.constraints.combine(found, graph.labels(operand))
    graph.constraints.mark(found)
    return Labelled(_with_new_constants(graph, node, found))


def spatial(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Pooling, resizing and padding by reflection keep channels apart."""
    labels, output = graph.labels(args[0]), node.meta["val"]
    if not isinstance(output, Tensor):
        raise UncoveredError
    num_spatial = next(int(letter) for letter in str(node.target) if letter in "123")
    first = labels
    for dim in range(-num_spatial, 0):
        first = first.narrow(dim, 0, 1)
    if any(varies(labels, -1 - dim) for dim in range(num_spatial)):
        graph.constraints.join(labels, first)
    return Labelled(tidy(_with_new_constants(graph, node, first.expand(output.shape))))


def reduction(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Reduced units are a set; the result is a constant for one set, or a unit for each of several."""
    labels, output = graph.labels(args[0]), node.meta["val"]
    dims = _dims_of(node, args, kwargs, labels.dim())
    if dims is None or not isinstance(output, Tensor):
        raise UncoveredError
    keeps = output.dim() == labels.dim()
    if not any(varies(labels, dim) for dim in dims):
        found = labels[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(labels.dim()))]
        return Labelled(tidy(_with_new_constants(graph, node, found if keeps else found.reshape(output.shape))))
    (small,) = compact(labels)
    rows = as_rows(small, dims)
    which = graph.constraints.add_sets(rows)
    if int(which.max()) == 0:
        constraints = graph.constraints
        made = torch.full_like(which, constraints.constant(("set", constraints.count, len(constraints.colours))))
    else:
        made = graph.constraints.unit_per_set(rows, which)
    made = made.reshape([1 if dim in dims else small.shape[dim] for dim in range(small.dim())])
    wide = made.expand([1 if dim in dims else labels.shape[dim] for dim in range(labels.dim())])
    return Labelled(tidy(wide if keeps else wide.reshape(output.shape)))


def _dims_of(node: fx.Node, args: list[Any], kwargs: dict[str, Any], num_dims: int) -> list[int] | None:
    overload = str(node.target)
    position = 2 if "vector_norm" in overload or "norm.Scalar" in overload else 1
    if overload.endswith(".default") and position == 1 and "amax" not in overload and "amin" not in overload:
        return list(range(num_dims))
    dims = kwargs.get("dim", args[position] if len(args) > position else None)
    if isinstance(dims, bool) or not isinstance(dims, int | list | tuple):
        return None
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [dim % num_dims for dim in listed] or list(range(num_dims))


def softmax(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The units along the dimension are a set, and each keeps its label."""
    labels = graph.labels(args[0])
    if varies(labels, args[1]):
        graph.constraints.add_sets(as_rows(compact(labels)[0], [args[1]]))
    return Labelled(labels)


def pad(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Padding with a constant."""
    mode = args[2] if len(args) > 2 and isinstance(args[2], str) else "constant"
    if mode != "constant":
        raise UncoveredError
    value = next((part for part in args[2:] if isinstance(part, int | float)), kwargs.get("value") or 0.0)
    labels = graph.labels(args[0])
    padded = torch.constant_pad_nd(labels, list(args[1]), graph.constraints.constant(float(value)))
    return Labelled(tidy(padded))


def new_tensor(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A new tensor of known numbers, with the shape or dtype of an activation."""
    like = node.args[0].meta["val"]  # type: ignore[union-attr]
    assert callable(node.target)
    return node.target(torch.zeros(like.shape, dtype=like.dtype), *args[1:], **kwargs)


OPERATOR_RULES: dict[str, OperatorRule] = {
    **dict.fromkeys(MOVES.split(), move),
    **dict.fromkeys(POINTWISE.split(), pointwise),
    **dict.fromkeys(ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(SPATIAL.split(), spatial),
    **dict.fromkeys(REDUCTIONS.split(), reduction),
    **dict.fromkeys(["softmax", "log_softmax", "_softmax", "_log_softmax"], softmax),
    **dict.fromkeys(["pad", "constant_pad_nd"], pad),
    **dict.fromkeys(["new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"], new_tensor),
    "_assert_tensor_metadata": lambda *_: None,
    **LAYERS,
}
"""The rule of each operator, by the operator's name."""
