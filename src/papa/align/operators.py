"""What each operator does to labels: the rules of `LabelPropagation`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from papa.align.labels import (
    Call,
    Labelled,
    LabelPropagation,
    OperatorRule,
    StateTensor,
    UncoveredError,
    as_rows,
    compact,
    is_parameter,
    joint_shape,
    tidy,
    varies,
)


def move(graph: LabelPropagation, call: Call) -> Any:
    """An operator that only moves numbers runs on the labels themselves."""
    is_index = call.node.name.startswith("index")

    def labels(value: Any) -> Any:
        if isinstance(value, Labelled):
            return value.labels
        if isinstance(value, StateTensor) or (isinstance(value, Tensor) and not is_index):
            return graph.labels(value)
        return value

    args, kwargs = pytree.tree_map(labels, (call.args, call.kwargs))
    if "view.default" in str(call.node.target):
        result = args[0].reshape(args[1])  # labels may have other strides than the activation
    else:
        assert callable(call.node.target)
        result = call.node.target(*args, **kwargs)
    return pytree.tree_map(lambda part: Labelled(tidy(part)) if isinstance(part, Tensor) else part, result)


def pointwise(graph: LabelPropagation, call: Call) -> Labelled:
    """One function of every number of one activation: labels stay, constants become other constants."""
    labels, name = graph.labels(call.args[0]), call.node.name
    if any(isinstance(value, Tensor | StateTensor) for value in call.args[1:]) and name.startswith(("clamp", "rsub")):
        raise UncoveredError
    graph.constraints.mark(labels)
    return Labelled(_with_new_constants(graph, call, labels))


def _with_new_constants(graph: LabelPropagation, call: Call, labels: Tensor) -> Tensor:
    """The labels after an operator that changed the values of constants."""
    (small,) = compact(labels)
    if not bool((small < 0).any()):
        return labels
    distinct, inverse = torch.unique(small, return_inverse=True)
    new = [graph.constraints.constant((call.node.name, label)) if label < 0 else label for label in distinct.tolist()]
    return tidy(torch.tensor(new, device="cpu")[inverse].expand(labels.shape))


def elementwise(graph: LabelPropagation, call: Call) -> Labelled:
    """Several activations are combined number by number: units of all operands in one place are one unit."""
    operands = [value for value in call.args if isinstance(value, Labelled | StateTensor | Tensor)]
    found = graph.labels(operands[0])
    for operand in operands[1:]:
        found = graph.constraints.combine(found, graph.labels(operand))
    graph.constraints.mark(found)
    return Labelled(_with_new_constants(graph, call, found))


def spatial(graph: LabelPropagation, call: Call) -> Labelled:
    """Pooling, resizing and padding by reflection combine numbers within a channel."""
    labels, shape = graph.labels(call.args[0]), call.shape
    num_spatial = next(int(letter) for letter in str(call.node.target) if letter in "123")
    first = labels
    for dim in range(-num_spatial, 0):
        first = first.narrow(dim, 0, 1)
    if any(varies(labels, -1 - dim) for dim in range(num_spatial)):
        graph.constraints.join(labels, first)
    return Labelled(tidy(_with_new_constants(graph, call, first.expand(shape))))


def reduction(graph: LabelPropagation, call: Call) -> Labelled:
    """A function that ignores the order of its arguments: reduced units are a set.

    The result is a constant for one set, or a unit for each of several.
    """
    labels = graph.labels(call.args[0])
    dims = _reduced_dims(call, labels.dim())
    keeps = len(call.shape) == labels.dim()
    if not any(varies(labels, dim) for dim in dims):
        found = labels[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(labels.dim()))]
        return Labelled(tidy(_with_new_constants(graph, call, found if keeps else found.reshape(call.shape))))
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
    return Labelled(tidy(wide if keeps else wide.reshape(call.shape)))


def _reduced_dims(call: Call, num_dims: int) -> list[int]:
    if "dim" not in call.by_name:
        return list(range(num_dims))
    dims = call["dim"]
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [dim % num_dims for dim in listed] or list(range(num_dims))


def softmax(graph: LabelPropagation, call: Call) -> Labelled:
    """The units along the dimension are a set, and each keeps its label."""
    labels = graph.labels(call.args[0])
    if varies(labels, call["dim"]):
        graph.constraints.add_sets(as_rows(compact(labels)[0], [call["dim"]]))
    return Labelled(labels)


def pad(graph: LabelPropagation, call: Call) -> Labelled:
    """Padding with a constant."""
    if (call["mode"] or "constant") != "constant":
        raise UncoveredError
    constant = graph.constraints.constant(float(call["value"] or 0.0))
    return Labelled(tidy(torch.constant_pad_nd(graph.labels(call.args[0]), list(call["pad"]), constant)))


def new_tensor(graph: LabelPropagation, call: Call) -> Any:
    """A new tensor of known numbers, with the shape or dtype of an activation."""
    like = call.node.args[0].meta["val"]  # type: ignore[union-attr]
    assert callable(call.node.target)
    return call.node.target(torch.zeros(like.shape, dtype=like.dtype, device="cpu"), *call.args[1:], **call.kwargs)


def linear(graph: LabelPropagation, call: Call) -> Labelled:
    """Input units lie along dim 1 of the weight, output units along dim 0."""
    weight, bias = call["weight"], call["bias"]
    if not is_parameter(weight):
        raise UncoveredError
    labels = graph.labels(call["input"])
    inputs, outputs = graph.axis(weight, 1), graph.axis(weight, 0)
    if bias is not None:
        graph.constraints.combine(outputs, graph.labels(bias))
    if not varies(labels, -1) and any(varies(labels, dim) for dim in range(labels.dim() - 1)):
        # The layer mixes positions, say, and units lie along another dimension: they pass through it.
        graph.constraints.freeze(inputs)
        graph.constraints.freeze(outputs)
        return Labelled(tidy(labels[..., :1].expand(call.shape)))
    graph.constraints.join(labels, inputs)
    return Labelled(tidy(outputs.expand(call.shape)))


def convolution(graph: LabelPropagation, call: Call) -> Labelled:
    """As `linear`, with units along the channels; each group of a grouped convolution is a set of channels."""
    weight, bias, groups = call["weight"], call["bias"], int(call["groups"])
    if not is_parameter(weight):
        raise UncoveredError
    inputs, outputs = _channels(graph, weight, groups)
    if "transpose" in str(call.node.target):
        inputs, outputs = outputs, inputs
    if groups > 1 and len(inputs) == groups == len(outputs):  # depthwise: one unit in, the same unit out
        graph.constraints.join(inputs, outputs)
    elif groups > 1:
        graph.constraints.add_sets(torch.cat([inputs.view(groups, -1), outputs.view(groups, -1)], dim=1))
    trailing = (1,) * (weight.tensor.dim() - 2)
    graph.constraints.join(graph.labels(call["input"]), inputs.view(-1, *trailing))
    if bias is not None:
        graph.constraints.combine(outputs, graph.labels(bias))
    return Labelled(tidy(outputs.view(-1, *trailing).expand(call.shape)))


def _channels(graph: LabelPropagation, weight: StateTensor, groups: int) -> tuple[Tensor, Tensor]:
    """The labels along dims 1 and 0 of a convolution's weight; along dim 1, group after group."""
    if groups == 1:
        channels = graph.axis(weight, 1)
    elif weight.tensor.shape[1] == 1:
        channels = graph.constraints.new_units(groups)
    else:
        rows = weight.tensor.shape[0] // groups
        channels = torch.cat([graph.axis(weight, 1, (group * rows, (group + 1) * rows)) for group in range(groups)])
    return channels, graph.axis(weight, 0)


def channel_norm(graph: LabelPropagation, call: Call) -> Labelled:
    """BatchNorm and instance norm in evaluation mode: a channel owns its weight, bias and running statistics."""
    labels = graph.labels(call["input"])
    for leaf in [call[name] for name in ("weight", "bias", "running_mean", "running_var")]:
        if leaf is None:
            continue
        if not isinstance(leaf, StateTensor):
            raise UncoveredError
        graph.constraints.join(labels, graph.axis(leaf, 0).view(-1, *[1] * (labels.dim() - 2)))
    return Labelled(labels)


def layer_norm(graph: LabelPropagation, call: Call) -> Labelled:
    """The units along the normalised dimensions are a set."""
    labels = graph.labels(call["input"])
    dims = list(range(labels.dim() - len(call["normalized_shape"]), labels.dim()))
    if any(varies(labels, dim) for dim in dims):
        graph.constraints.add_sets(as_rows(compact(labels)[0], dims))
    for affine in (call["weight"], call["bias"]):
        if affine is not None:
            graph.constraints.join(labels, graph.labels(affine))
    return Labelled(labels)


def group_norm(graph: LabelPropagation, call: Call) -> Labelled:
    """The channels of each group are a set."""
    labels = graph.labels(call["input"])
    (small,) = compact(labels)
    channels = small.expand(small.shape[0], labels.shape[1], *small.shape[2:])
    graph.constraints.add_sets(channels.reshape(small.shape[0] * call["num_groups"], -1))
    for affine in (call["weight"], call["bias"]):
        if affine is not None:
            graph.constraints.join(labels, graph.labels(affine).view(-1, *[1] * (labels.dim() - 2)))
    return Labelled(labels)


def embedding(graph: LabelPropagation, call: Call) -> Labelled:
    """Rows are looked up by index and frozen; columns are units."""
    if not is_parameter(call["weight"]):
        raise UncoveredError
    graph.constraints.freeze(graph.axis(call["weight"], 0))
    return Labelled(tidy(graph.axis(call["weight"], 1).expand(call.shape)))


def matmul(graph: LabelPropagation, call: Call) -> Labelled:
    """A product of activations: for each index of the leading dimensions, the contracted units are a set."""
    first, second = (graph.labels(value) for value in call.args)
    if first.dim() < 2 or second.dim() < 2 or any(map(is_parameter, call.args)):
        raise UncoveredError
    return _product(graph, first, second, call.shape)


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


def attention(graph: LabelPropagation, call: Call) -> Labelled:
    """Each head is a block; inside it, query and key units are joined in pairs and value units are free."""
    query, key, value = (graph.labels(call[name]) for name in ("query", "key", "value"))
    mask = call["attn_mask"]
    if any(varies(part, -2) for part in (query, key, value)) or call["enable_gqa"]:
        raise UncoveredError
    scores = _product(graph, query, key.transpose(-1, -2), torch.Size([*query.shape[:-1], key.shape[-2]]))
    if isinstance(mask, Labelled | StateTensor):
        graph.freeze(mask)
        graph.constraints.freeze(scores.labels)
    elif mask is not None:
        labels = graph.labels(mask).expand(scores.labels.shape)
        graph.constraints.colour(scores.labels, labels)
    return _product(graph, scores.labels, value, torch.Size([*query.shape[:-1], value.shape[-1]]))


OPERATORS: dict[OperatorRule, str] = {
    move: """view reshape _unsafe_view permute transpose t numpy_T mT adjoint cat concat stack chunk split
        split_with_sizes unbind slice select flatten unflatten expand expand_as squeeze unsqueeze pixel_shuffle
        pixel_unshuffle channel_shuffle roll flip repeat repeat_interleave index_select narrow movedim swapaxes tile
        diagonal unfold index view_as unsafe_split unsafe_chunk tensor_split hstack vstack""",
    pointwise: """relu relu6 hardtanh gelu silu sigmoid tanh elu selu leaky_relu hardswish hardsigmoid softplus mish
        celu log_sigmoid softsign exp log log1p expm1 sqrt rsqrt square abs neg sign sin cos erf reciprocal clamp
        clamp_min clamp_max floor round dropout feature_dropout alpha_dropout contiguous clone detach alias
        lift_fresh_copy to _to_copy type_as nan_to_num rsub logical_not threshold softshrink hardshrink""",
    elementwise: """add sub mul div maximum minimum where pow true_divide addcmul lerp atan2 eq ne gt lt ge le
        logical_and logical_or bitwise_and bitwise_or masked_fill""",
    spatial: """max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d _upsample_bicubic2d_aa
        _upsample_bilinear2d_aa""",
    reduction: "mean sum amax amin linalg_vector_norm norm var std logsumexp prod",
    softmax: "softmax log_softmax _softmax _log_softmax",
    pad: "pad constant_pad_nd",
    new_tensor: "new_zeros new_ones new_full zeros_like ones_like full_like",
    linear: "linear",
    convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    channel_norm: "batch_norm instance_norm",
    layer_norm: "layer_norm rms_norm",
    group_norm: "group_norm",
    embedding: "embedding",
    matmul: "matmul bmm",
    attention: "scaled_dot_product_attention",
    lambda *_: None: "_assert_tensor_metadata",
}
OPERATOR_RULES = {name: rule for rule, names in OPERATORS.items() for name in names.split()}
"""The rule of each operator, by the operator's name."""
