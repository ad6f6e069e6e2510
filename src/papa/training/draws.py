"""Random numbers of stacked members, such as dropout masks: each member draws as the loop lets it draw.

A member's random numbers are a function of the seed, the member and the step. So they do not depend on the other
members, on the number of processes, or on whether the training was resumed.

One member's step is watched for its random operators (`Watch`). In the operators that are recorded for all members,
random ones are replaced by inputs (`replace_draws_`), which are drawn before each step, member by member (`Draws`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from papa.errors import ConfigError
from papa.streams import seed_global_

_ATEN = torch.ops.aten
KNOWN = {
    _ATEN.bernoulli.p,
    _ATEN.bernoulli_.float,
    _ATEN.exponential_.default,
    _ATEN.native_dropout.default,
    _ATEN.normal.float_float,
    _ATEN.normal_.default,
    _ATEN.rand.default,
    _ATEN.rand_like.default,
    _ATEN.randint.default,
    _ATEN.randint.low,
    _ATEN.randn.default,
    _ATEN.randn_like.default,
    _ATEN.uniform_.default,
}
"""Operators whose random numbers depend only on the form of their arguments, not on numbers in tensors."""


@dataclass(frozen=True)
class Draw:
    """A random operator of one member's step."""

    operator: Any
    arguments: tuple[Any, ...]
    """Tensors among them have the form of the network's, in memory of their own."""
    options: dict[str, Any]

    def __call__(self) -> Tensor:
        """Draw from the global generator, as the network would."""
        drawn: Tensor | tuple[Tensor, Tensor] = self.operator(*self.arguments, **self.options)
        return drawn if isinstance(drawn, Tensor) else drawn[1]  # the mask of `native_dropout`


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the random operators that run inside the block, in `draws`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; remember it if it is random."""
        kwargs = kwargs or {}
        if _is_random(func, args, kwargs):
            copies = [_of_same_form(each) if isinstance(each, Tensor) else each for each in args]
            self.draws.append(Draw(func, tuple(copies), kwargs))
        return func(*args, **kwargs)


class Draws:
    """What all members draw in a step.

    Args:
        draws: what one member draws.
        num_members: the number of members.
    """

    def __init__(self, draws: Sequence[Draw], num_members: int) -> None:
        for draw in draws:
            if draw.operator not in KNOWN or draw.options.get("generator") is not None:
                raise ConfigError(
                    f"the stacked engine cannot draw the random numbers of {_name(draw.operator)}, which depend on "
                    "other numbers or on a generator of the network: use the loop engine"
                )
        self.draws = draws
        self.tensors = [torch.stack([draw()] * num_members) for draw in draws]
        """Of each draw, one tensor with a leading dimension of members."""
        self._parts = list(zip(*[tensor.unbind() for tensor in self.tensors], strict=True))

    def draw_(self, seeds: Iterable[int]) -> None:
        """Draw the next numbers into `tensors`, each member's from its own seed."""
        if not self.draws:
            return
        for seed, parts in zip(seeds, self._parts, strict=True):
            seed_global_(seed)
            for draw, part in zip(self.draws, parts, strict=True):
                part.copy_(draw())


def replace_draws_(recorded: fx.GraphModule, draws: Draws) -> None:
    """Turn the random operators of a recorded step into further inputs, in the order of `draws.tensors`."""
    graph = recorded.graph
    nodes = [
        node for node in graph.nodes if node.op == "call_function" and _is_random(node.target, node.args, node.kwargs)
    ]
    found = [(_name(node.target), _shape(node)) for node in nodes]
    expected = [(_name(draw.operator), tensor.shape) for draw, tensor in zip(draws.draws, draws.tensors, strict=True)]
    if found != expected:
        raise ConfigError(
            f"the stacked engine cannot draw a member's random numbers as the member alone does: found {found}, "
            f"expected {expected}: use the loop engine"
        )
    after_inputs = next(node for node in graph.nodes if node.op != "placeholder")
    for number, node in enumerate(nodes):
        with graph.inserting_before(after_inputs):
            drawn = graph.placeholder(f"draw_{number}")
        with graph.inserting_before(node):
            if node.target is _ATEN.native_dropout.default:
                _replace_dropout_(graph, node, drawn)
            elif node.target._schema.is_mutable:
                node.replace_all_uses_with(graph.call_function(_ATEN.copy_.default, (node.args[0], drawn)))
            else:
                node.replace_all_uses_with(drawn)
        graph.erase_node(node)
    recorded.recompile()


def _replace_dropout_(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> None:
    """Dropout with a given mask, as accelerators have it in one operator: outputs and mask."""
    inputs, probability, *_ = node.args
    assert isinstance(probability, float)
    kept = graph.call_function(_ATEN.mul.Tensor, (inputs, mask))
    outputs = graph.call_function(_ATEN.mul.Scalar, (kept, 1 / (1 - probability)))
    for user in list(node.users):
        user.replace_all_uses_with((outputs, mask)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)


def _is_random(operator: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    # Attention is marked as random, but is not without dropout.
    names = [argument.name for argument in operator._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, arguments, strict=False)), **options}.get("dropout_p"))


def _name(operator: Any) -> str:
    """The name of an operator; an operator in place has that of the other."""
    return str(operator.overloadpacket.__name__).rstrip("_")


def _shape(node: fx.Node) -> torch.Size:
    value = node.meta["val"]
    return (value if isinstance(value, Tensor) else value[1]).shape


def _of_same_form(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
