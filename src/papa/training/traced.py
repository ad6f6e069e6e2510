"""One call for all members: the network is vectorised by `torch.func`, and its operators are recorded once.

A call of a `vmap` function costs about a millisecond of overhead, however small the network. It runs the same operators
in every step, so they are recorded (`make_fx`) and then run directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from papa.errors import ConfigError
from papa.training.draws import Draws, replace_draws_

Tensors: TypeAlias = Mapping[str, Tensor]
Recorded: TypeAlias = Callable[..., list[Tensor]]
LossOf: TypeAlias = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
"""From a network, inputs and targets to the mean loss of the batch."""


def record(
    network: nn.Module,
    loss_of: LossOf,
    *,
    trained: Tensors,
    others: Tensors,
    inputs: Tensor,
    targets: Tensor,
    draws: Draws,
) -> Recorded:
    """Record one step of all members, for tensors of these shapes, each with a leading dimension of members.

    The network's Python code runs here only: its decisions are made once.

    Args:
        network: any member, or a copy of one.
        loss_of: the mean loss of the network on a batch.
        trained: the parameters to differentiate.
        others: the other parameters, and the buffers. Buffers must be contiguous (`vmap` drops what a forward pass
            writes to strided ones) and are changed, here and by what is returned.
        inputs: a batch for each member.
        targets: the targets of these batches.
        draws: the random numbers of a step, which the recorded step takes as inputs.

    Returns:
        A function of `*trained.values(), *others.values(), inputs, targets, *draws.tensors` that returns a list: the
        gradients of what is trained, and last the losses.
    """
    num_trained = len(trained)

    def member_loss(trained: Tensors, others: Tensors, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(partial(functional_call, network, {**trained, **others}), inputs, targets)

    def step(*tensors: Tensor) -> list[Tensor]:
        *numbers, inputs, targets = tensors
        here = dict(zip(trained, numbers[:num_trained], strict=True))
        there = dict(zip(others, numbers[num_trained:], strict=True))
        gradients, losses = vmap(grad_and_value(member_loss), randomness="different")(here, there, inputs, targets)
        return [*gradients.values(), losses]

    arguments = (*trained.values(), *others.values(), inputs, targets)
    calls = _Calls()
    try:
        with calls, _NormsInFullPrecision():
            recorded = make_fx(step)(*arguments)
    except Exception as error:  # whatever torch raises at an operator that vmap does not know
        raise ConfigError(
            f"the stacked engine cannot train a {type(network).__name__}: it fails at {calls.failed} "
            f"({_first_line(error)}): use the loop engine"
        ) from error
    replace_draws_(recorded, draws)
    if not _writes(recorded.graph) and not any(True for _ in network.buffers()):
        _shorten_(recorded, (*arguments, *draws.tensors))
    return recorded.forward


class _Calls(TorchFunctionMode):
    """Remembers which torch function failed first."""

    failed = "an operator"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function; remember its name if it fails."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if self.failed == _Calls.failed:
                self.failed = getattr(func, "__name__", str(func))
            raise


class _NormsInFullPrecision(TorchFunctionMode):
    """Under autocast, `vmap` fails at norms of half-precision inputs with float32 weights or statistics.

    So inputs are converted to float32 and outputs back. The norms' own kernels compute in float32, too.
    """

    norms = (F.batch_norm, F.instance_norm, F.layer_norm, torch.batch_norm, torch.instance_norm, torch.layer_norm)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, a norm in float32 if its inputs have another dtype than its weights."""
        kwargs = kwargs or {}
        if func in self.norms and args:
            inputs, *others = args
            dtypes = [each.dtype for each in (*others, *kwargs.values()) if isinstance(each, Tensor)]
            if inputs.dtype in (torch.bfloat16, torch.float16) and inputs.dtype not in dtypes:
                return func(inputs.float(), *others, **kwargs).to(inputs.dtype)
        return func(*args, **kwargs)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _writes(graph: fx.Graph) -> bool:
    """Whether an operator writes to its arguments; then no operator may be removed."""
    schemas = [getattr(node.target, "_schema", None) for node in graph.nodes]
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _shorten_(recorded: fx.GraphModule, arguments: tuple[Tensor, ...]) -> None:
    """Remove operators that are repeated or change nothing: a third of those of a logistic regression."""
    values: dict[Any, Any] = {}

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    with torch.no_grad():
        Run(recorded).run(*arguments)
    first: dict[str, fx.Node] = {}
    for node in list(recorded.graph.nodes):
        if node.op != "call_function":
            continue
        key = f"{node.target} {node.args} {node.kwargs}"  # nodes have unique names
        same = node.args[0] if _is_identity(node, values) else first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            recorded.graph.erase_node(node)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()


_ATEN = torch.ops.aten
_RESHAPES = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.expand.default, _ATEN.detach.default)


def _is_identity(node: fx.Node, values: Mapping[Any, Any]) -> bool:
    """Whether a reshape keeps the shape, or a scaling the values."""
    if node.target is _ATEN.mul.Scalar:
        return bool(node.args[1] == 1 and values[node].dtype == values[node.args[0]].dtype)
    if node.target not in _RESHAPES:
        return False
    before, after = values[node.args[0]], values[node]
    return bool(before.shape == after.shape and before.stride() == after.stride())
