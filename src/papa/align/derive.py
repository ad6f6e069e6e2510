"""Deriving a network's symmetries from its exported graph."""

from __future__ import annotations

import itertools
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from papa import layout
from papa.align.grouping import unit_groups
from papa.align.operators import OPERATOR_RULES
from papa.align.propagation import LabelPropagation, StateTensor, operator_name
from papa.align.unit_groups import ExportedGraph, Symmetries
from papa.align.verification import cpu_copy, verified_groups
from papa.errors import MemberError, PapaError


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
            f"operator {name} is not supported (called {times} times): the units it touches stay in place", stacklevel=2
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
