"""Deriving a network's symmetries from its exported graph, and verifying that they do not change its outputs."""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from papa.align.grouping import unit_groups
from papa.align.operators import OPERATOR_RULES
from papa.align.permute import inverses, permute_all_, require_tensor, tensors_by_name
from papa.align.propagation import LabelPropagation, StateTensor, operator_name
from papa.align.unit_groups import ExportedGraph, Symmetries, UnitGroup
from papa.core import layout
from papa.errors import MemberError, PapaError, PapaWarning
from papa.streams import stream

TOLERANCE = 1e-9
"""How far outputs may move in float64, relative to the largest, when a group is permuted."""


def symmetries(model: nn.Module, example_input: Any) -> Symmetries:
    """Find which units of a network can be permuted without changing its function.

    The graph that `torch.export` returns, in evaluation mode, runs on labels of units instead of numbers. The resulting
    groups are verified: a copy of the network with random weights is permuted at random in float64, and a group
    that changes its outputs is dropped with a warning. The units that an unsupported operator touches stay in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> found = symmetries(net, torch.randn(3, 4))
        >>> [(group.size, len(group.axes)) for group in found]
        [(8, 7)]

    Args:
        model: the network, unchanged.
        example_input: one batch of inputs, or a tuple of the network's arguments.

    Returns:
        The groups of exchangeable units.
    """
    twin, args = cpu_copy(model, example_input)
    program = _export(twin, args)
    state = _state_tensors(program, twin)
    propagation = LabelPropagation(program.graph_module, state, OPERATOR_RULES)
    propagation.run(enable_io_processing=False)
    for name, times in sorted(propagation.unsupported.items()):
        warnings.warn(
            f"operator {name} is not supported (called {times} times): the units it touches stay in place",
            PapaWarning,
            stacklevel=2,
        )
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    graph = ExportedGraph(
        program.graph_module,
        {placeholder: tensor.name for placeholder, tensor in state.items() if placeholder not in constants},
        {placeholder: state[placeholder].tensor for placeholder in constants},
    )
    groups = unit_groups(propagation)
    del twin, program, state, propagation  # verification copies the weights: free these first
    return Symmetries(verified_groups(model, example_input, groups), graph)


def check_same_graph(first: nn.Module, second: nn.Module, example_input: Any, *, subjects: tuple[str, str]) -> None:
    """Raise a `MemberError` unless two networks run the same operators; networks that print alike are not exported."""
    if type(first) is type(second) and str(first) == str(second):
        return
    programs = [_export(*cpu_copy(model, example_input)) for model in (first, second)]
    operators = [
        [operator_name(node) for node in program.graph.nodes if node.op not in ("placeholder", "output")]
        for program in programs
    ]
    for number, (mine, theirs) in enumerate(itertools.zip_longest(*operators)):
        if mine != theirs:
            raise MemberError(
                f"{subjects[0]} runs {mine or 'nothing'} as operator {number}, {subjects[1]} runs {theirs or 'nothing'}"
                ": only networks of one architecture can be aligned"
            )


def _export(model: nn.Module, args: tuple[Any, ...]) -> torch.export.ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise PapaError(
            f"{type(model).__name__} cannot be exported{_location(error)} ({type(error).__name__}: {reason}), so its "
            "symmetries cannot be derived. Write its groups by hand as papa.align.Symmetries and check them with "
            "papa.align.verify, or keep all units in place with symmetries=papa.align.Symmetries(())"
        ) from error


def _location(error: BaseException) -> str:
    """The innermost line of the network's own code in an error's traceback."""
    foreign = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(foreign)]
    return f" because of {Path(frames[-1].filename).name}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def _state_tensors(program: torch.export.ExportedProgram, model: nn.Module) -> dict[str, StateTensor]:
    """Parameters, buffers and constants by placeholder; tied tensors under their first name."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, _, _, _, tensor in layout.tensors_of(model):
        tensors[names.setdefault(id(tensor), name)] = tensors[name] = tensor
    signature, state = program.graph_signature, {}
    for sources, is_parameter in ((signature.inputs_to_parameters, True), (signature.inputs_to_buffers, False)):
        for placeholder, name in sources.items():
            state[placeholder] = StateTensor(names[id(tensors[name])], tensors[name].detach(), is_parameter)
    for placeholder, name in signature.inputs_to_lifted_tensor_constants.items():
        state[placeholder] = StateTensor(name, program.constants[name], False)
    return state


def verify(model: nn.Module, symmetries: Symmetries, example_input: Any) -> Symmetries:
    """Check symmetries that were written by hand, in the same way as derived ones; the network does not change.

    A group lists every axis of the network's tensors that has to be permuted together: the tensor's name, the
    dimension, and the indices along it that belong to each unit. Blocks come first, then units inside blocks
    (`is_inner`). The input is one batch, or a tuple of the network's arguments.

    Example:
        >>> from papa.align import TensorAxis
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> units = torch.arange(3)[:, None]
        >>> axes = [TensorAxis(name, dim, units) for name, dim in [("0.weight", 0), ("0.bias", 0), ("2.weight", 1)]]
        >>> hidden = UnitGroup("hidden", 3, tuple(axes))
        >>> [group.name for group in verify(net, Symmetries((hidden,)), torch.randn(5, 4))]
        ['hidden']

    Returns:
        The symmetries without the groups that change the network's outputs; a warning names each of these.
    """
    tensors = tensors_by_name(model)
    names = [group.name for group in symmetries]
    for group in symmetries:
        if names.count(group.name) > 1:
            raise PapaError(f"there are two groups named '{group.name}': give each group a different name")
        for axis in group.axes:
            require_tensor(tensors, axis)
            index = axis.index
            if index.dim() != 2 or len(index) != group.size or index.numel() != len(set(index.flatten().tolist())):
                raise PapaError(
                    f"group '{group.name}' has indices of shape {tuple(index.shape)} at '{axis.tensor}', expected a "
                    f"row of indices for each of its {group.size} units, none of them twice"
                )
    return replace(symmetries, groups=verified_groups(model, example_input, symmetries.groups))


@torch.no_grad()
def verified_groups(model: nn.Module, example_input: Any, groups: tuple[UnitGroup, ...]) -> tuple[UnitGroup, ...]:
    """The groups that can be permuted without changing the outputs of a copy with random weights, in float64."""
    generator = stream(0, "align")
    twin, args = cpu_copy(model, example_input)
    twin._apply(lambda tensor: tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone())  # type: ignore[no-untyped-call]
    _randomise_(twin, generator)
    args = pytree.tree_map(lambda part: _with_noise(part, generator), args)
    expected = _outputs(twin, args)
    permutations = {group.name: torch.randperm(group.size, generator=generator) for group in groups}

    def holds(some: tuple[UnitGroup, ...]) -> bool:
        chosen = {group.name: permutations[group.name] for group in some}
        permute_all_(twin, Symmetries(some), chosen)
        difference = _relative_difference(_outputs(twin, args), expected)
        permute_all_(twin, Symmetries(some), inverses(chosen))
        return difference < TOLERANCE

    failing = {group.name for group in _failing(groups, holds)}
    for group in groups:
        if group.name in failing:
            warnings.warn(
                f"the group of {group.size} units at '{group.name}' changes the network's outputs when permuted: it is "
                "dropped and its units stay in place",
                PapaWarning,
                stacklevel=3,
            )
    return tuple(group for group in groups if group.name not in failing)


def cpu_copy(model: nn.Module, example_input: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy in evaluation mode and its arguments, on the CPU; parameters that are there already share their memory."""
    args = example_input if isinstance(example_input, tuple) else (example_input,)
    args = pytree.tree_map(lambda part: part.detach().cpu() if isinstance(part, Tensor) else part, args)
    views: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            view = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            view.__dict__.update(parameter.__dict__)
            views[id(parameter)] = view
    return copy.deepcopy(model, views).cpu().eval(), args


def _failing(groups: tuple[UnitGroup, ...], holds: Callable[[tuple[UnitGroup, ...]], bool]) -> tuple[UnitGroup, ...]:
    """The groups that change the outputs, found by halving."""
    if not groups or holds(groups):
        return ()
    if len(groups) == 1:
        return groups
    middle = len(groups) // 2
    return _failing(groups[:middle], holds) + _failing(groups[middle:], holds)


def _randomise_(model: nn.Module, generator: torch.Generator) -> None:
    """Remove structure that could hide an error, such as scales of zero or equal biases."""
    for _, is_parameter, _, key, tensor in layout.tensors_of(model):
        if not tensor.is_floating_point() or not (is_parameter or key in ("running_mean", "running_var")):
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        tensor.nan_to_num_(1.0, 1.0, 1.0)  # the symmetries of a diverged network are those of any other
        if key == "running_var":
            tensor.mul_(1.0 + 0.5 * noise.tanh())
        else:
            tensor.add_(noise * (0.3 * tensor.square().mean().sqrt() + 0.03))


def _with_noise(part: Any, generator: torch.Generator) -> Any:
    if not isinstance(part, Tensor) or not part.is_floating_point():
        return part
    return part.double().nan_to_num(0.0, 1.0, -1.0) + torch.randn(part.shape, generator=generator, dtype=torch.float64)


def _outputs(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    return [part.double() for part in pytree.tree_leaves(model(*args)) if isinstance(part, Tensor)]


def _relative_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference relative to the largest expected number; infinite if anything found is not finite."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        if not torch.isfinite(mine).all():
            return float("inf")
        if theirs.numel():
            scale, gap = theirs.abs().max().item(), (mine - theirs).abs().max().item()
            worst = max(worst, gap / scale if scale > 0 else gap)
    return worst
