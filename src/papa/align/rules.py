"""What each operator does to labels: elementwise operators, moves of data, and sums over units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from papa.align.labels import compact, tidy, varies
from papa.align.layers import LAYERS
from papa.align.meeting import together
from papa.align.trace import Labelled, Leaf, Rule, Trace


def _names(listing: str) -> list[str]:
    return listing.split()


MOVES = _names("""view reshape _unsafe_view permute transpose t numpy_T mT adjoint cat concat stack chunk split
split_with_sizes unbind slice select flatten unflatten expand expand_as squeeze unsqueeze pixel_shuffle
pixel_unshuffle channel_shuffle roll flip repeat repeat_interleave index_select narrow movedim swapaxes tile diagonal
unfold index view_as unsafe_split unsafe_chunk tensor_split hstack vstack""")
"""Operators that only move numbers: they run on the labels themselves."""

POINTWISE = _names("""relu relu6 hardtanh gelu silu sigmoid tanh elu selu leaky_relu hardswish hardsigmoid softplus
mish celu log_sigmoid softsign exp log log1p expm1 sqrt rsqrt square abs neg sign sin cos erf reciprocal clamp clamp_min
clamp_max floor round dropout feature_dropout alpha_dropout contiguous clone detach alias lift_fresh_copy to _to_copy
type_as nan_to_num rsub logical_not threshold softshrink hardshrink""")
"""Operators of one activation that treat every number alike."""

ELEMENTWISE = _names("""add sub mul div maximum minimum where pow true_divide addcmul lerp atan2 eq ne gt lt
ge le logical_and logical_or bitwise_and bitwise_or masked_fill""")
"""Operators that take the numbers of several activations in the same place together."""

SPATIAL = _names("""max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa""")
"""Operators that take numbers of one channel together."""

REDUCTIONS = _names("mean sum amax amin linalg_vector_norm norm var std logsumexp prod")
"""Operators that sum, in some way, over dimensions."""


def move(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the labels."""
    is_index = node.name.startswith("index")

    def labels(value: Any) -> Any:
        if isinstance(value, Labelled):
            return value.labels
        if isinstance(value, Leaf) or (isinstance(value, Tensor) and not is_index):
            return trace.labels(value)
        return value

    args, kwargs = pytree.tree_map(labels, (args, kwargs))
    if "view.default" in str(node.target):
        result = args[0].reshape(args[1])  # labels have strides of their own
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    return pytree.tree_map(lambda part: Labelled(tidy(part)) if isinstance(part, Tensor) else part, result)


def pointwise(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Numbers change, labels stay; constants become other constants."""
    labels = trace.labels(args[0])
    if any(isinstance(value, Tensor | Leaf) for value in args[1:]) and node.name.startswith(("clamp", "rsub")):
        return NotImplemented
    trace.ledger.mark(labels)
    return Labelled(renamed(trace, node, labels))


def renamed(trace: Trace, node: fx.Node, labels: Tensor) -> Tensor:
    """The labels after an operator that changed the values of constants."""
    (small,) = compact(labels)
    if not bool((small < 0).any()):
        return labels
    distinct, inverse = torch.unique(small, return_inverse=True)
    new = [trace.ledger.constant((node.name, label)) if label < 0 else label for label in distinct.tolist()]
    return tidy(torch.tensor(new)[inverse].expand(labels.shape))


def elementwise(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Units that meet in one place are one unit."""
    operands = [value for value in args if isinstance(value, Labelled | Leaf | Tensor)]
    found = trace.labels(operands[0])
    for operand in operands[1:]:
        found = together(trace, found, trace.labels(operand))
    trace.ledger.mark(found)
    return Labelled(renamed(trace, node, found))


def spatial(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Pooling, resizing and padding by reflection."""
    labels, output = trace.labels(args[0]), node.meta["val"]
    if not isinstance(output, Tensor):
        return NotImplemented
    dims = next(int(letter) for letter in str(node.target) if letter in "123")
    first = labels
    for dim in range(labels.dim() - dims, labels.dim()):
        first = first.narrow(dim, 0, 1)
    if any(varies(labels, labels.dim() - 1 - dim) for dim in range(dims)):
        trace.ledger.join(labels, first)
    return Labelled(tidy(renamed(trace, node, first.expand(output.shape))))


def reduction(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A sum over dimensions; units that are summed over are a set, and their sum is a constant or a unit of its own."""
    labels, output = trace.labels(args[0]), node.meta["val"]
    dims = _dims_of(node, args, kwargs, labels.dim())
    if dims is None or not isinstance(output, Tensor):
        return NotImplemented
    keeps = output.dim() == labels.dim()
    if not any(varies(labels, dim) for dim in dims):
        found = labels[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(labels.dim()))]
        return Labelled(tidy(renamed(trace, node, found if keeps else found.reshape(output.shape))))
    rows = trace.ledger.rows(labels, dims)
    which = trace.ledger.block(rows)
    (small,) = compact(labels)
    shape = [1 if dim in dims else small.shape[dim] for dim in range(small.dim())]
    found = set_labels(trace, rows, which).reshape(shape)
    wide = found.expand([1 if dim in dims else labels.shape[dim] for dim in range(labels.dim())])
    return Labelled(tidy(wide if keeps else wide.reshape(output.shape)))


def set_labels(trace: Trace, rows: Tensor, which: Tensor) -> Tensor:
    """The label of what is made of a whole row of units: a constant, or a unit that moves with the row's block."""
    ledger, number = trace.ledger, int(which.max()) + 1
    if number == 1:
        return torch.full_like(which, ledger.constant(("set", ledger.count, len(ledger.colours))))
    made = ledger.fresh(number)
    distinct = torch.zeros(number, rows.shape[1], dtype=torch.int64)
    distinct[which] = rows
    ledger.block(torch.cat([distinct, made[:, None]], dim=1))
    return made[which]


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


def softmax(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A function of a whole set that gives each of its units one number."""
    labels = trace.labels(args[0])
    if varies(labels, args[1]):
        trace.ledger.block(trace.ledger.rows(labels, [args[1]]))
    return Labelled(labels)


def pad(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Padding with a constant."""
    mode = args[2] if len(args) > 2 and isinstance(args[2], str) else "constant"
    if mode != "constant":
        return NotImplemented
    value = next((part for part in args[2:] if isinstance(part, int | float)), kwargs.get("value") or 0.0)
    labels = trace.labels(args[0])
    padded = torch.constant_pad_nd(labels, list(args[1]), trace.ledger.constant(float(value)))
    return Labelled(tidy(padded))


def made(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A new tensor of known numbers, with the shape or kind of an activation."""
    like = node.args[0].meta["val"]  # type: ignore[union-attr]
    assert callable(node.target)
    return node.target(torch.zeros(like.shape, dtype=like.dtype), *args[1:], **kwargs)


def nothing(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A check that gives nothing."""
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVES, move),
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(SPATIAL, spatial),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(["softmax", "log_softmax", "_softmax", "_log_softmax"], softmax),
    **dict.fromkeys(["pad", "constant_pad_nd"], pad),
    **dict.fromkeys(["new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"], made),
    "_assert_tensor_metadata": nothing,
    **LAYERS,
}
"""The rule of each operator, by its name."""
