"""What layers with weights, and products of activations, do to labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from papa.align.propagation import Labelled, LabelPropagation, OperatorRule, StateTensor, is_parameter
from papa.align.unit_labels import UncoveredError, as_rows, compact, joint_shape, tidy, varies


def argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def linear(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Input units lie along dim 1 of the weight, output units along dim 0."""
    weight, bias = args[1], argument(args, kwargs, 2, "bias")
    if not is_parameter(weight):
        raise UncoveredError
    labels = graph.labels(args[0])
    inputs, outputs = graph.axis(weight, 1), graph.axis(weight, 0)
    if bias is not None:
        graph.constraints.combine(outputs, graph.labels(bias))
    if not varies(labels, -1) and any(varies(labels, dim) for dim in range(labels.dim() - 1)):
        # The layer mixes positions, say, and units lie along another dimension: they pass through it.
        graph.constraints.freeze(inputs)
        graph.constraints.freeze(outputs)
        return Labelled(tidy(labels[..., :1].expand(node.meta["val"].shape)))
    graph.constraints.join(labels, inputs)
    return Labelled(tidy(outputs.expand(node.meta["val"].shape)))


def convolution(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """As `linear`, with units along the channels; each group of a grouped convolution is a set of channels."""
    weight, bias = args[1], argument(args, kwargs, 2, "bias")
    if not is_parameter(weight):
        raise UncoveredError
    is_transposed = "transpose" in str(node.target)
    groups = int(argument(args, kwargs, 6, "groups", 1))
    labels, output = graph.labels(args[0]), node.meta["val"]
    inputs, outputs = _channels(graph, weight, groups, is_transposed)
    if groups > 1 and len(inputs) == groups == len(outputs):  # depthwise: one unit in, the same unit out
        graph.constraints.join(inputs, outputs)
    elif groups > 1:
        graph.constraints.add_sets(torch.cat([inputs.view(groups, -1), outputs.view(groups, -1)], dim=1))
    trailing = (1,) * (weight.tensor.dim() - 2)
    graph.constraints.join(labels, inputs.view(-1, *trailing))
    if bias is not None:
        graph.constraints.combine(outputs, graph.labels(bias))
    return Labelled(tidy(outputs.view(-1, *trailing).expand(output.shape)))


def _channels(graph: LabelPropagation, weight: StateTensor, groups: int, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """The labels of input channels and output channels; of a grouped convolution, group after group."""
    if groups == 1:
        channels = graph.axis(weight, 1)
    elif weight.tensor.shape[1] == 1:
        channels = graph.constraints.new_units(groups)
    else:
        rows = weight.tensor.shape[0] // groups
        channels = torch.cat([graph.axis(weight, 1, (group * rows, (group + 1) * rows)) for group in range(groups)])
    axes = channels, graph.axis(weight, 0)
    return axes[::-1] if is_transposed else axes


def channel_norm(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """BatchNorm and instance norm in evaluation mode: a channel owns its weight, bias and running statistics."""
    labels = graph.labels(args[0])
    for leaf in args[1:5]:
        if leaf is None:
            continue
        if not isinstance(leaf, StateTensor):
            raise UncoveredError
        graph.constraints.join(labels, graph.axis(leaf, 0).view(-1, *[1] * (labels.dim() - 2)))
    return Labelled(labels)


def layer_norm(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The units along the normalised dimensions are a set."""
    labels = graph.labels(args[0])
    dims = list(range(labels.dim() - len(args[1]), labels.dim()))
    if any(varies(labels, dim) for dim in dims):
        graph.constraints.add_sets(as_rows(compact(labels)[0], dims))
    for position, name in enumerate(["weight", "bias"] if "layer_norm" in str(node.target) else ["weight"], start=2):
        affine = argument(args, kwargs, position, name)
        if affine is not None:
            graph.constraints.join(labels, graph.labels(affine))
    return Labelled(labels)


def group_norm(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The channels of each group are a set."""
    labels, groups = graph.labels(args[0]), int(args[1])
    (small,) = compact(labels)
    channels = small.expand(small.shape[0], labels.shape[1], *small.shape[2:])
    graph.constraints.add_sets(channels.reshape(small.shape[0] * groups, -1))
    for position, name in ((2, "weight"), (3, "bias")):
        affine = argument(args, kwargs, position, name)
        if affine is not None:
            graph.constraints.join(labels, graph.labels(affine).view(-1, *[1] * (labels.dim() - 2)))
    return Labelled(labels)


def embedding(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows are looked up by index and frozen; columns are units."""
    if not is_parameter(args[0]):
        raise UncoveredError
    graph.constraints.freeze(graph.axis(args[0], 0))
    return Labelled(tidy(graph.axis(args[0], 1).expand(node.meta["val"].shape)))


def matmul(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A product of activations: for each index of the leading dimensions, the contracted units are a set."""
    first, second = graph.labels(args[0]), graph.labels(args[1])
    if first.dim() < 2 or second.dim() < 2 or is_parameter(args[0]) or is_parameter(args[1]):
        raise UncoveredError
    return _product(graph, first, second, node.meta["val"].shape)


def _product(graph: LabelPropagation, first: Tensor, second: Tensor, shape: torch.Size) -> Labelled:
    lead = joint_shape(first.shape[:-2], second.shape[:-2])
    first, second = first.expand(*lead, *first.shape[-2:]), second.expand(*lead, *second.shape[-2:])
    rows_vary, columns_vary = varies(first, -2), varies(second, -1)
    sums_vary = varies(first, -1) or varies(second, -2)
    if (rows_vary and columns_vary) or (sums_vary and (rows_vary or columns_vary)):
        raise UncoveredError
    if bool((first < 0).any()) or bool((second < 0).any()):
        raise UncoveredError
    left, right = first[..., :1, :], second[..., :, :1].transpose(-1, -2)
    if sums_vary:
        graph.constraints.join(left, right)
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in (left, right)], dim=1)
        made = graph.constraints.unit_per_set(rows, graph.constraints.add_sets(rows))
        return Labelled(tidy(made.view(*shape[:-2], 1, 1).expand(shape)))
    if columns_vary or rows_vary:
        unit, scale = (second[..., :1, :], left[..., :1]) if columns_vary else (first[..., :1], right[..., :1])
        parts = [part.flatten(-2) for part in (unit, scale)]
        graph.constraints.add_sets(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], dim=1))
        return Labelled(tidy(unit.expand(shape)))
    graph.constraints.join(left[..., :1], right[..., :1])
    return Labelled(tidy(left[..., :1].expand(shape)))


def attention(graph: LabelPropagation, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Each head is a block; inside it, query and key units are joined in pairs and value units are free."""
    query, key, value = (graph.labels(part) for part in args[:3])
    mask = argument(args, kwargs, 3, "attn_mask")
    if any(varies(part, -2) for part in (query, key, value)) or kwargs.get("enable_gqa"):
        raise UncoveredError
    scores = _product(graph, query, key.transpose(-1, -2), torch.Size([*query.shape[:-1], key.shape[-2]]))
    if isinstance(mask, Labelled | StateTensor):
        graph.freeze(mask)
        graph.constraints.freeze(scores.labels)
    elif mask is not None:
        labels = graph.labels(mask).expand(scores.labels.shape)
        graph.constraints.colour(scores.labels, labels)
    return _product(graph, scores.labels, value, torch.Size([*query.shape[:-1], value.shape[-1]]))


LAYERS: dict[str, OperatorRule] = {
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
"""The rule of each layer, by the operator's name."""
