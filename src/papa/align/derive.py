"""Deriving a network's symmetries from its graph, and proving them."""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from papa import layout
from papa.align.groups import Group, Program, Symmetries, groups_of
from papa.align.permute import found_tensor, permute_all_, undoing
from papa.align.rules import RULES
from papa.align.trace import Leaf, Trace, name_of
from papa.errors import MemberError, PapaError
from papa.streams import stream

TOLERANCE = 1e-9
"""How far outputs may move, relative to the largest, when a group is permuted in float64."""


def symmetries(model: nn.Module, example_input: Any) -> Symmetries:
    """Which units of a network can be permuted without changing its function.

    The network's graph is taken with `torch.export` in evaluation mode and run on labels of units instead of numbers.
    What comes out is proved: a copy of the network with random weights is permuted at random in float64, and a group
    that changes its outputs is dropped with a warning. An operator that is not known freezes the units it touches.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> found = symmetries(net, torch.randn(3, 4))
        >>> [(group.size, len(group.slots)) for group in found]
        [(8, 7)]

    Args:
        model: the network, unchanged.
        example_input: one batch of inputs, or a tuple of the arguments that the network takes.

    Returns:
        The groups of exchangeable units.
    """
    groups, program = _traced(*_on_cpu(model, example_input))
    # Proved on a copy that no graph refers to, whose numbers are gone as soon as it is.
    return Symmetries(proved_(*_on_cpu(model, example_input), groups), program)


def _traced(model: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Group, ...], Program]:
    """The groups that the graph shows, yet to be proved, and the graph."""
    program = _exported(model, args)
    leaves = _leaves(program, model)
    trace = Trace(leaves, RULES)
    trace.run(program.graph)
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    return groups_of(trace), Program(
        program.graph_module,
        {placeholder: leaf.name for placeholder, leaf in leaves.items() if placeholder not in constants},
        {placeholder: leaves[placeholder].tensor for placeholder in constants},
    )


def _exported(model: nn.Module, args: tuple[Any, ...]) -> torch.export.ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise PapaError(
            f"{type(model).__name__} cannot be exported{_whereabouts(error)} ({type(error).__name__}: {reason}): its "
            "units cannot be derived. Write out its groups by hand as papa.align.Symmetries and check them with "
            "papa.align.prove, or keep all units where they are with groups=papa.align.Symmetries(())"
        ) from error


def _whereabouts(error: BaseException) -> str:
    """The innermost line of the network's own code at which an error came up."""
    foreign = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(foreign)]
    return f" because of {Path(lines[-1].filename).name}:{lines[-1].lineno}, `{lines[-1].line}`" if lines else ""


def prove(model: nn.Module, symmetries: Symmetries, example_input: Any) -> Symmetries:
    """Those groups of symmetries written by hand that hold, proved as derived ones are.

    A group lists every place in the network's tensors that has to be permuted together: of each tensor the axis, and
    which indices along it each unit owns. Whole blocks go first, then units inside of blocks (`is_inner`).

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> from papa.align import Slot
        >>> units = torch.arange(3)[:, None]
        >>> places = [("0.weight", 0), ("0.bias", 0), ("2.weight", 1)]
        >>> hidden = Group("hidden", 3, tuple(Slot(name, axis, units) for name, axis in places))
        >>> [group.name for group in prove(net, Symmetries((hidden,)), torch.randn(5, 4))]
        ['hidden']

    Args:
        model: the network, unchanged.
        symmetries: the groups.
        example_input: one batch of inputs, or a tuple of the arguments that the network takes.

    Returns:
        The same without the groups that change the network's outputs, which a warning names.
    """
    tensors = {name: tensor for name, _, _, _, tensor in layout.tensors_of(model)}
    names = [group.name for group in symmetries]
    for group in symmetries:
        if names.count(group.name) > 1:
            raise PapaError(f"there are two groups named '{group.name}': give each a name of its own")
        for slot in group.slots:
            found_tensor(tensors, slot)
            if (
                slot.index.dim() != 2
                or len(slot.index) != group.size
                or slot.index.numel() != len(set(slot.index.flatten().tolist()))
            ):
                raise PapaError(
                    f"group '{group.name}' has {tuple(slot.index.shape)} indices at '{slot.tensor}', expected a row of "
                    f"indices for each of its {group.size} units, none of them twice"
                )
    twin, args = _on_cpu(model, example_input)
    return replace(symmetries, groups=proved_(twin, args, symmetries.groups))


def check_same_graph(first: nn.Module, second: nn.Module, example_input: Any, *, subjects: tuple[str, str]) -> None:
    """Raise a `MemberError` unless two networks run the same operators; networks built alike need no look."""
    if type(first) is type(second) and str(first) == str(second):
        return
    graphs = [_operators(*_on_cpu(model, example_input)) for model in (first, second)]
    for number, (mine, theirs) in enumerate(itertools.zip_longest(*graphs)):
        if mine != theirs:
            raise MemberError(
                f"{subjects[0]} runs {mine or 'nothing'} as operator {number}, {subjects[1]} runs {theirs or 'nothing'}"
                ": only networks of one architecture can be aligned"
            )


def _operators(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    nodes = _exported(model, args).graph.nodes
    return [name_of(node) for node in nodes if node.op not in ("placeholder", "output")]


def _on_cpu(model: nn.Module, example_input: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    args = example_input if isinstance(example_input, tuple) else (example_input,)
    args = pytree.tree_map(lambda part: part.detach().cpu() if isinstance(part, Tensor) else part, args)
    return _twin(model).cpu().eval(), args


def _twin(model: nn.Module) -> nn.Module:
    """A copy of a network whose parameters are views of the network's: to look at, without the memory of a copy."""
    views: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            view = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            view.__dict__.update(parameter.__dict__)
            views[id(parameter)] = view
    return copy.deepcopy(model, views)


def _leaves(program: torch.export.ExportedProgram, model: nn.Module) -> dict[str, Leaf]:
    """Parameters, buffers and constants by placeholder; tied tensors under their first name."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, _, _, _, tensor in layout.tensors_of(model):
        tensors[names.setdefault(id(tensor), name)] = tensor
        tensors[name] = tensor
    signature, leaves = program.graph_signature, {}
    for sources, is_parameter in ((signature.inputs_to_parameters, True), (signature.inputs_to_buffers, False)):
        for placeholder, name in sources.items():
            tensor = tensors[name]
            leaves[placeholder] = Leaf(names[id(tensor)], tensor.detach(), is_parameter)
    constants: Mapping[str, Any] = program.constants
    for placeholder, name in signature.inputs_to_lifted_tensor_constants.items():
        leaves[placeholder] = Leaf(name, constants[name], False)
    return leaves


@torch.no_grad()
def proved_(twin: nn.Module, args: tuple[Any, ...], groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Those groups whose random permutation leaves the outputs of a network where they were, in float64.

    Args:
        twin: a copy of the network, which gets random weights of its own.
        args: what it takes.
        groups: which to prove.
    """
    generator = stream(0, "align")
    twin._apply(_as_float64)  # type: ignore[no-untyped-call]
    _randomise_(twin, generator)
    args = pytree.tree_map(lambda part: _noisy(part, generator), args)
    expected = _outputs(twin, args)
    orders = {group.name: torch.randperm(group.size, generator=generator) for group in groups}

    def holds(some: tuple[Group, ...]) -> bool:
        chosen = {group.name: orders[group.name] for group in some}
        permute_all_(twin, Symmetries(some), chosen)
        distance = _distance(_outputs(twin, args), expected)
        permute_all_(twin, Symmetries(some), undoing(chosen))
        return distance < TOLERANCE

    broken = {group.name for group in _failing(groups, holds)}
    for group in groups:
        if group.name in broken:
            warnings.warn(
                f"the group of {group.size} units at '{group.name}' changes the network's outputs when permuted: it is "
                "dropped and stays where it is",
                UserWarning,
                stacklevel=3,
            )
    return tuple(group for group in groups if group.name not in broken)


def _as_float64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _failing(groups: tuple[Group, ...], holds: Any) -> tuple[Group, ...]:
    """The groups that break a network, found by halving."""
    if not groups or holds(groups):
        return ()
    if len(groups) == 1:
        return groups
    middle = len(groups) // 2
    return _failing(groups[:middle], holds) + _failing(groups[middle:], holds)


def _randomise_(model: nn.Module, generator: torch.Generator) -> None:
    """Weights without any structure that could hide a mistake, such as scales of zero or equal biases."""
    for _, is_parameter, _, key, tensor in layout.tensors_of(model):
        if not tensor.is_floating_point() or not (is_parameter or key in ("running_mean", "running_var")):
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        tensor.nan_to_num_(1.0, 1.0, 1.0)  # a network that diverged has the symmetries of any other
        if key == "running_var":
            tensor.mul_(1.0 + 0.5 * noise.tanh())
        else:
            tensor.add_(noise * (0.3 * tensor.square().mean().sqrt() + 0.03))


def _noisy(part: Any, generator: torch.Generator) -> Any:
    if not isinstance(part, Tensor) or not part.is_floating_point():
        return part
    return part.double().nan_to_num(0.0, 1.0, -1.0) + torch.randn(part.shape, generator=generator, dtype=torch.float64)


def _outputs(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    return [part.double() for part in pytree.tree_leaves(model(*args)) if isinstance(part, Tensor)]


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference relative to the largest number; infinite where anything is not a number."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().item() if theirs.numel() else 1.0
        gap = (mine - theirs).abs().max().item() if theirs.numel() else 0.0
        worst = max(worst, gap / scale if scale > 0 else gap)
        if not torch.isfinite(mine).all():
            return float("inf")
    return worst
