"""What layers with weights do to labels, and products of activations with each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from papa.align.labels import compact, joint_shape, tidy, varies
from papa.align.meeting import together
from papa.align.trace import Labelled, Leaf, Rule, Trace


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter just as the module holds it."""
    return isinstance(value, Leaf) and value.is_parameter


def argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument that may come by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def linear(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Inputs along axis 1 of the weight, outputs along axis 0."""
    weight, bias = args[1], argument(args, kwargs, 2, "bias")
    if not is_parameter(weight):
        return NotImplemented
    labels = trace.labels(args[0])
    inputs, outputs = trace.axis(weight, 1), trace.axis(weight, 0)
    if bias is not None:
        together(trace, outputs, trace.labels(bias))
    if not varies(labels, -1) and any(varies(labels, dim) for dim in range(labels.dim() - 1)):
        # The layer mixes along a dimension that is no unit's own, such as positions: units pass through it.
        trace.ledger.freeze(inputs)
        trace.ledger.freeze(outputs)
        return Labelled(tidy(labels[..., :1].expand(node.meta["val"].shape)))
    trace.ledger.join(labels, inputs)
    return Labelled(tidy(outputs.expand(node.meta["val"].shape)))


def convolution(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """As `linear`, channels on the axis before the spatial ones; each group of channels is a block."""
    weight, bias = args[1], argument(args, kwargs, 2, "bias")
    if not is_parameter(weight):
        return NotImplemented
    is_transposed = "transpose" in str(node.target)
    groups = int(argument(args, kwargs, 6, "groups", 1))
    labels, output = trace.labels(args[0]), node.meta["val"]
    num_spatial = weight.tensor.dim() - 2
    inputs, outputs = _grouped_axes(trace, weight, groups) if groups > 1 else _plain_axes(trace, weight, is_transposed)
    if groups > 1 and is_transposed:
        inputs, outputs = outputs, inputs
    if groups > 1 and len(inputs) == groups == len(outputs):  # depthwise: one unit in, the same unit out
        trace.ledger.join(inputs, outputs)
    elif groups > 1:
        trace.ledger.block(torch.cat([inputs.view(groups, -1), outputs.view(groups, -1)], dim=1))
    trailing = (1,) * num_spatial
    trace.ledger.join(labels, inputs.view(-1, *trailing))
    if bias is not None:
        together(trace, outputs, trace.labels(bias))
    return Labelled(tidy(outputs.view(-1, *trailing).expand(output.shape)))


def _plain_axes(trace: Trace, weight: Leaf, is_transposed: bool) -> tuple[Tensor, Tensor]:
    axes = trace.axis(weight, 1), trace.axis(weight, 0)
    return axes[::-1] if is_transposed else axes


def _grouped_axes(trace: Trace, weight: Leaf, groups: int) -> tuple[Tensor, Tensor]:
    """The labels of axis 1, group after group, and those of axis 0."""
    if weight.tensor.shape[1] == 1:
        return trace.ledger.fresh(groups), trace.axis(weight, 0)
    rows = weight.tensor.shape[0] // groups
    parts = [trace.axis(weight, 1, (group * rows, (group + 1) * rows)) for group in range(groups)]
    return torch.cat(parts), trace.axis(weight, 0)


def channel_norm(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Batch and instance norm in evaluation: each channel for itself, with its affine numbers and statistics."""
    labels = trace.labels(args[0])
    for leaf in args[1:5]:
        if leaf is None:
            continue
        if not isinstance(leaf, Leaf):
            return NotImplemented
        trace.ledger.join(labels, trace.axis(leaf, 0).view(-1, *[1] * (labels.dim() - 2)))
    return Labelled(labels)


def layer_norm(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The units along the normalised dimensions are a set."""
    labels = trace.labels(args[0])
    dims = list(range(labels.dim() - len(args[1]), labels.dim()))
    if any(varies(labels, dim) for dim in dims):
        trace.ledger.block(trace.ledger.rows(labels, dims))
    for position in (2, 3) if "layer_norm" in str(node.target) else (2,):
        affine = argument(args, kwargs, position, ("weight", "bias")[position - 2])
        if affine is not None:
            trace.ledger.join(labels, trace.labels(affine))
    return Labelled(labels)


def group_norm(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The channels of each group are a set."""
    labels, groups = trace.labels(args[0]), int(args[1])
    (small,) = compact(labels)
    channels = small.expand(small.shape[0], labels.shape[1], *small.shape[2:])
    trace.ledger.block(channels.reshape(small.shape[0] * groups, -1))
    for position, name in ((2, "weight"), (3, "bias")):
        affine = argument(args, kwargs, position, name)
        if affine is not None:
            trace.ledger.join(labels, trace.labels(affine).view(-1, *[1] * (labels.dim() - 2)))
    return Labelled(labels)


def embedding(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows are looked up by number and stay; columns are units."""
    if not is_parameter(args[0]):
        return NotImplemented
    trace.ledger.freeze(trace.axis(args[0], 0))
    return Labelled(tidy(trace.axis(args[0], 1).expand(node.meta["val"].shape)))


def matmul(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A product of activations; what it sums over is a set, for each index of the leading dimensions."""
    first, second = trace.labels(args[0]), trace.labels(args[1])
    if first.dim() < 2 or second.dim() < 2 or is_parameter(args[0]) or is_parameter(args[1]):
        return NotImplemented
    return _product(trace, first, second, node.meta["val"].shape)


def _product(trace: Trace, first: Tensor, second: Tensor, shape: torch.Size) -> Any:
    lead = joint_shape(first.shape[:-2], second.shape[:-2])
    first, second = first.expand(*lead, *first.shape[-2:]), second.expand(*lead, *second.shape[-2:])
    rows_vary, columns_vary = varies(first, -2), varies(second, -1)
    sums_vary = varies(first, -1) or varies(second, -2)
    if (rows_vary and columns_vary) or (sums_vary and (rows_vary or columns_vary)):
        return NotImplemented
    if bool((first < 0).any()) or bool((second < 0).any()):
        return NotImplemented
    left, right = first[..., :1, :], second[..., :, :1].transpose(-1, -2)
    if sums_vary:
        trace.ledger.join(left, right)
        return _of_sets(trace, [left, right], shape)
    if columns_vary or rows_vary:
        unit, scale = (second[..., :1, :], left[..., :1]) if columns_vary else (first[..., :1], left[..., :1])
        if rows_vary:
            scale = right[..., :1]
        _head_blocks(trace, [unit.flatten(-2), scale.flatten(-2)])
        return Labelled(tidy(unit.expand(shape)))
    trace.ledger.join(left[..., :1], right[..., :1])
    return Labelled(tidy(left[..., :1].expand(shape)))


def _head_blocks(trace: Trace, parts: list[Tensor]) -> Tensor:
    small = [part.reshape(-1, part.shape[-1]) for part in parts]
    return trace.ledger.block(torch.cat(small, dim=1))


def _of_sets(trace: Trace, parts: list[Tensor], shape: torch.Size) -> Labelled:
    """Labels of what each leading index makes of its units: one that moves with them."""
    which = _head_blocks(trace, [part.flatten(-2) for part in parts])
    made = trace.ledger.fresh(int(which.max()) + 1)
    rows = torch.cat([part.flatten(-2).reshape(len(which), -1) for part in parts], dim=1)
    if len(made) > 1:
        trace.ledger.block(torch.cat([rows, made[which][:, None]], dim=1))
    return Labelled(tidy(made[which].view(*shape[:-2], 1, 1).expand(shape)))


def attention(trace: Trace, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Scaled dot-product attention: each head is a block; within it queries pair with keys, values are free."""
    query, key, value = (trace.labels(part) for part in args[:3])
    mask = argument(args, kwargs, 3, "attn_mask")
    if any(varies(part, -2) for part in (query, key, value)) or kwargs.get("enable_gqa"):
        return NotImplemented
    scores = _product(trace, query, key.transpose(-1, -2), torch.Size([*query.shape[:-1], key.shape[-2]]))
    if scores is NotImplemented:
        return NotImplemented
    if isinstance(mask, Labelled | Leaf):
        trace.freeze(mask)
        trace.ledger.freeze(scores.labels)
    elif mask is not None:
        labels = trace.labels(mask).expand(scores.labels.shape)
        trace.ledger.colour(scores.labels, labels)
    return _product(trace, scores.labels, value, torch.Size([*query.shape[:-1], value.shape[-1]]))


LAYERS: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], convolution),
    **dict.fromkeys(["batch_norm", "instance_norm"], channel_norm),
    **dict.fromkeys(["layer_norm", "rms_norm"], layer_norm),
    "group_norm": group_norm,
    "embedding": embedding,
    **dict.fromkeys(["matmul", "bmm"], matmul),
    "scaled_dot_product_attention": attention,
}
"""The rule of each layer, by its operator's name."""
