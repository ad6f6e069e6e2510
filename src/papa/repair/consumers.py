"""What the outputs of a network's layers go into: BatchNorm, or an activation function."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from papa.evaluation.inputs import each, inputs_of, num_examples
from papa.repair.statistics import all_layers, run_with_hook

# Names of aten operators, without the trailing underscore of those that work in place. Softmax is not an activation
# function here: it is applied to attention scores.
# fmt: off
ACTIVATIONS = frozenset({
    "_prelu_kernel", "celu", "clamp", "clamp_min", "elu", "erf", "gelu", "glu", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "leaky_relu", "log_sigmoid_forward", "mish", "prelu", "relu", "relu6", "rrelu_with_noise",
    "selu", "sigmoid", "silu", "softplus", "softshrink", "tanh", "threshold",
})
# Normalisation, pooling, reshaping, and arithmetic such as residual connections.
PASSED_THROUGH = frozenset({
    "_batch_norm_with_update", "_fused_rms_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm", "native_dropout", "native_group_norm",
    "native_layer_norm",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "cat", "clone", "detach", "expand", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view",
    "add", "div", "mul", "neg", "rsub", "sub",
})
# fmt: on


def feeds_batch_norm(model: nn.Module, batches: Iterable[Any]) -> dict[str, bool]:
    """The convolutions and linear layers that run, in order, and whether their output goes straight into BatchNorm.

    Determined on two examples. A layer that runs several times feeds BatchNorm only if it does so every time.
    """
    waiting: dict[int, tuple[str, Tensor]] = {}  # keeps the outputs, so that no id is used twice
    num_runs: Counter[str] = Counter()
    num_fed: Counter[str] = Counter()

    def on_output(name: str, layer: nn.Module, output: Tensor, use: int) -> None:
        num_runs[name] += 1
        waiting[id(output)] = (name, output)

    def on_batch_norm(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        name, _ = waiting.pop(id(inputs[0]) if inputs else 0, ("", None))
        num_fed[name] += 1

    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                stack.callback(layer.register_forward_pre_hook(on_batch_norm).remove)
        run_with_hook(model, _two_examples(batches), on_output, all_layers(model))
    return {name: num_fed[name] == runs for name, runs in num_runs.items()}


def feeds_activation(model: nn.Module, batches: Iterable[Any]) -> set[str]:
    """The convolutions and linear layers with an output that reaches an activation function before another layer.

    It may pass through normalisation, pooling, reshaping and residual connections on the way. Determined on two
    examples.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2))
        >>> feeds_activation(net, [torch.randn(2, 4)])
        {'0'}
    """
    follow = _FollowOutputs()
    with follow:
        run_with_hook(
            model,
            _two_examples(batches),
            lambda name, layer, output, use: follow.mark(output, frozenset({name})),
            all_layers(model),
        )
    return follow.activated


def _two_examples(batches: Iterable[Any]) -> list[Any]:
    filled = (inputs for batch in batches if num_examples(inputs := inputs_of(batch)))
    return [each(inputs, lambda part: part[:2]) for inputs in itertools.islice(filled, 1)]


class _FollowOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows outputs of layers through the operators of a forward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[int, tuple[Tensor, frozenset[str]]] = {}  # keeps tensors, so that no id is used twice
        self.activated: set[str] = set()

    def mark(self, tensor: Tensor, layers: frozenset[str]) -> None:
        self.sources[id(tensor)] = (tensor, layers)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        inputs = [self.sources[id(leaf)][1] for leaf in tree_leaves(args) if id(leaf) in self.sources]
        layers = frozenset[str]().union(*inputs)
        operator = func.overloadpacket.__name__.removesuffix("_")
        if operator in ACTIVATIONS:
            self.activated |= layers
        elif layers and operator in PASSED_THROUGH:
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor):
                    self.mark(output, layers)
        return outputs
