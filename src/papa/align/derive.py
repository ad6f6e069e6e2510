"""Deriving a network's symmetries from its exported graph, and verifying that they do not change its outputs.

From the constraints on labels to groups of exchangeable units:

1. Labels joined by edges are one unit. Sets link units into blocks: the units of several sets of one operator, such as
   the heads of an attention layer, may only move together with their set.
2. Every block and every unit gets a signature, a hash of all it must have in common with the others to be exchangeable:
   the axes it lies on and the colours of its labels.
3. Blocks of equal signature form a group; so do units of equal signature inside one block.
"""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from papa.align.labels import (
    FROZEN,
    AxisKey,
    Booleans,
    Constraints,
    Integers,
    LabelPropagation,
    StateTensor,
    hashed,
    operator_name,
    rank_among_equal,
)
from papa.align.operators import OPERATOR_RULES
from papa.align.unit_groups import (
    ExportedGraph,
    Symmetries,
    TensorAxis,
    UnitGroup,
    inverses,
    permute_all_,
    require_tensor,
)
from papa.core.layout import named_tensors, tensors_of
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
        with warnings.catch_warnings(), torch.device("cpu"):
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
    for name, _, _, _, tensor in tensors_of(model):
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
    tensors = named_tensors(model)
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
    permutations = {group.name: torch.randperm(group.size, generator=generator, device="cpu") for group in groups}

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
    for _, is_parameter, _, key, tensor in tensors_of(model):
        if not tensor.is_floating_point() or not (is_parameter or key in ("running_mean", "running_var")):
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
        tensor.nan_to_num_(1.0, 1.0, 1.0)  # the symmetries of a diverged network are those of any other
        if key == "running_var":
            tensor.mul_(1.0 + 0.5 * noise.tanh())
        else:
            tensor.add_(noise * (0.3 * tensor.square().mean().sqrt() + 0.03))


def _with_noise(part: Any, generator: torch.Generator) -> Any:
    if not isinstance(part, Tensor) or not part.is_floating_point():
        return part
    noise = torch.randn(part.shape, generator=generator, dtype=torch.float64, device="cpu")
    return part.double().nan_to_num(0.0, 1.0, -1.0) + noise


def _outputs(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    with torch.device("cpu"):
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


def unit_groups(graph: LabelPropagation) -> tuple[UnitGroup, ...]:
    """The groups that a propagated graph implies: blocks and single units first, then units inside blocks."""
    axes = {key: labels.numpy() for key, labels in graph.axes.items()}
    _add_element_axes(graph, axes)
    partition = _partition(graph.constraints)
    unit, block = partition.unit, partition.block
    labels = np.arange(len(unit))
    is_owned = np.zeros(len(unit), dtype=bool)
    for found in axes.values():
        is_owned[unit[found]] = True
    is_unit = is_owned & (labels == unit)
    num_units = np.bincount(block[is_unit], minlength=len(unit))
    activations = {key: found.numpy() for key, found in graph.activations.items()}
    outer = _collect(
        {key: found for key, found in axes.items() if key[2] is None},
        activations,
        owner=block,
        signature=_block_signatures(partition, axes, is_unit),
        is_free=(num_units > 0) & (block[FROZEN] != labels),
    )
    inner = _collect(
        axes,
        activations,
        owner=unit,
        signature=_unit_signatures(partition, axes),
        is_free=is_unit & (num_units[block] > 1) & (unit[FROZEN] != labels),
    )
    return _named([*outer, *(replace(group, is_inner=True) for group in inner)])


@dataclass(frozen=True)
class _Partition:
    """The units and blocks that labels form, each named by its smallest label."""

    unit: Integers
    """The unit of each label."""
    block: Integers
    """The block of each label."""
    unit_colours: list[tuple[Integers, Integers]]
    """Units and colours: inside a block, only units of the same colours are exchangeable."""
    block_colours: list[tuple[Integers, Integers]]
    """Units and colours: blocks are exchangeable if their units, in order, have the same colours."""


def _partition(constraints: Constraints) -> _Partition:
    unit = _components(constraints.count, constraints.edges)
    colours = [(unit[labels], numbers) for labels, numbers in constraints.colours]
    block_colours, links = list(colours), []
    for operator, labels in constraints.sets:
        rows = np.unique(np.where(labels >= 0, unit[labels], labels), axis=0)
        which = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)[rows >= 0]
        units = rows[rows >= 0]
        colours.append((units, hashed(operator, which)))
        block_colours.append((units, hashed(operator, np.zeros_like(units))))
        if len(rows) > 1:
            first = np.broadcast_to(rows.max(axis=1, keepdims=True), rows.shape)[rows >= 0]
            links.append(np.stack([units, first]))
    block = _components(constraints.count, [*constraints.edges, *links])
    return _Partition(unit, block, colours, block_colours)


def _components(count: int, edges: list[Integers]) -> Integers:
    """The connected component of each label, named by its smallest label."""
    first, second = np.concatenate([np.zeros((2, 0), dtype=np.int64), *edges], axis=1)
    from scipy.sparse import coo_array, csgraph  # slow to import, and needed only by alignment

    graph = coo_array((np.ones(len(first), dtype=np.int8), (first, second)), (count, count))
    _, component = csgraph.connected_components(graph, directed=False)
    smallest = np.full(count, count, dtype=np.int64)
    np.minimum.at(smallest, component, np.arange(count))
    found: Integers = smallest[component]
    return found


def _add_element_axes(graph: LabelPropagation, axes: dict[AxisKey, Integers]) -> None:
    """For each parameter used like an activation, find the axis along which its units lie; freeze it if there is none.

    Numbers that the graph does not use, such as the last rows of a table of positions, move with those it uses.
    """
    constraints = graph.constraints
    unit = _components(constraints.count, constraints.edges)
    is_unused = _unused(constraints, unit)
    for name, elements in graph.elements.items():
        labels = unit[elements.numpy()]
        for dim in sorted(range(labels.ndim), key=lambda dim: -labels.shape[dim]):
            lines = np.moveaxis(labels, dim, 0).reshape(labels.shape[dim], -1)
            first = lines[np.arange(len(lines)), np.argmin(is_unused[lines], axis=1)]
            if ((lines == first[:, None]) | is_unused[lines]).all():
                known = axes.setdefault((name, dim, None), first)
                joined = np.broadcast_to(first[:, None], lines.shape)
                constraints.edges += [np.stack([known, first]), np.stack([lines.ravel(), joined.ravel()])]
                break
        else:
            flat = np.unique(labels)
            constraints.edges.append(np.stack([flat, np.zeros_like(flat)]))


def _unused(constraints: Constraints, unit: Integers) -> Booleans:
    """Whether a label has no edge, no colour and is in no set."""
    is_used = np.bincount(unit, minlength=len(unit))[unit] > 1
    for labels, _ in constraints.colours:
        is_used[labels] = True
    for _, rows in constraints.sets:
        is_used[rows[rows >= 0]] = True
    is_used[FROZEN] = True
    found: Booleans = ~is_used
    return found


def _block_signatures(partition: _Partition, axes: dict[AxisKey, Integers], is_unit: Booleans) -> Integers:
    """Equal for blocks that lie on the same axes in the same order and have the same colours."""
    unit, block = partition.unit, partition.block
    units = np.flatnonzero(is_unit)
    order, rank = rank_among_equal(block[units])
    rank_in_block = np.zeros(len(unit), dtype=np.int64)
    rank_in_block[units[order]] = rank
    signature = np.zeros(len(unit), dtype=np.int64)
    for number, (key, labels) in enumerate(axes.items()):
        if key[2] is None:
            order, rank = rank_among_equal(block[labels])
            ordered = unit[labels[order]]
            np.add.at(signature, block[ordered], hashed(number, rank, rank_in_block[ordered]))
    for owners, colours in partition.block_colours:
        pairs = np.unique(np.stack([owners, colours]), axis=1)
        np.add.at(signature, block[pairs[0]], hashed(rank_in_block[pairs[0]], pairs[1]))
    return signature


def _unit_signatures(partition: _Partition, axes: dict[AxisKey, Integers]) -> Integers:
    """Equal for units of one block that lie on the same axes and have the same colours."""
    signature = hashed(partition.block, np.zeros_like(partition.unit))
    for number, labels in enumerate(axes.values()):
        owners, counts = np.unique(partition.unit[labels], return_counts=True)
        np.add.at(signature, owners, hashed(number, counts))
    for units, colours in partition.unit_colours:
        pairs = np.unique(np.stack([units, colours]), axis=1)
        np.add.at(signature, pairs[0], hashed(np.full_like(pairs[1], -1), pairs[1]))
    return signature


def _collect(
    axes: dict[AxisKey, Integers],
    activations: dict[AxisKey, Integers],
    *,
    owner: Integers,
    signature: Integers,
    is_free: Booleans,
) -> list[UnitGroup]:
    """A group for all free owners (units or blocks) of equal signature, and its share of every axis."""
    free = np.flatnonzero(is_free)
    _, inverse, counts = np.unique(signature[free], return_inverse=True, return_counts=True)
    group_of, rank_of = np.full(len(owner), -1), np.zeros(len(owner), dtype=np.int64)
    order, rank = rank_among_equal(inverse)
    group_of[free], rank_of[free[order]] = np.where(counts[inverse] > 1, inverse, -1), rank
    group_of, rank_of = group_of[owner], rank_of[owner]
    found, seen = (_shares(some, group_of, rank_of, counts) for some in (axes, activations))
    return [
        UnitGroup("", int(counts[number]), tuple(its_axes), tuple(seen.get(number, [])))
        for number, its_axes in found.items()
    ]


def _shares(
    axes: dict[AxisKey, Integers], group_of: Integers, rank_of: Integers, sizes: Integers
) -> dict[int, list[TensorAxis]]:
    """Each group's part of every axis, left out where its units do not all have the same number of indices."""
    shares: dict[int, list[TensorAxis]] = {}
    for (name, dim, row_range), labels in axes.items():
        groups = group_of[labels]
        for number in np.unique(groups[groups >= 0]).tolist():
            positions = np.flatnonzero(groups == number)
            ranks = rank_of[labels[positions]]
            counts = np.bincount(ranks, minlength=sizes[number])
            if (counts == counts[0]).all():
                by_unit = positions[np.argsort(ranks, kind="stable")]
                index = torch.from_numpy(by_unit.reshape(sizes[number], -1))
                shares.setdefault(number, []).append(TensorAxis(name, dim, index, row_range))
    return shares


def _named(groups: list[UnitGroup]) -> tuple[UnitGroup, ...]:
    """Name each group after the tensor that produces its units, with a number if the name is taken."""
    used: dict[str, int] = {}
    named = []
    for group in groups:
        name = next((axis.tensor for axis in group.axes if axis.dim == 0), group.axes[0].tensor)
        used[name] = used.get(name, 0) + 1
        named.append(replace(group, name=name if used[name] == 1 else f"{name}#{used[name]}"))
    return tuple(named)
