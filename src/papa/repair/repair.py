"""REPAIR: give an averaged network the activation statistics that the networks it is made of have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from papa.errors import DataError
from papa.evaluation import rereadable
from papa.group import Group, LocalGroup, gather_or_raise
from papa.mixing import check_row, soup_row
from papa.population import Population
from papa.repair.batch_norm import reset_batch_norm_
from papa.repair.statistics import (
    ChannelStatistics,
    Record,
    channel_axis,
    feeds_batch_norm,
    layer_statistics,
    num_channels,
    repairable_layers,
    run_watched,
)

TOLERANCE = 1e-6
"""When `exact` statistics count as holding, relative to the goals."""
MOST_ROUNDS = 100
"""How often an exact repair tries one layer."""
LAYERS = (_ConvNd, nn.Linear)
"""The kinds of layers that REPAIR is about."""


@dataclass(frozen=True)
class Goal:
    """The mean and standard deviation that each channel of a layer should have."""

    mean: Tensor
    std: Tensor
    uses: tuple[Goal, ...] = ()
    """For a layer that runs several times in a pass, the goals of each time."""


@dataclass(frozen=True)
class RepairReport:
    """What REPAIR did, or would do, to each layer."""

    repaired: tuple[str, ...]
    """Layers that get the goals' means and standard deviations."""
    before_batch_norm: tuple[str, ...]
    """Layers without a bias that feed BatchNorm, which takes any mean out again: they get the standard deviations."""
    scaled_only: tuple[str, ...]
    """Layers with neither a bias nor BatchNorm after them: they get the standard deviations, their means stay off."""
    left_alone: tuple[str, ...]
    """The output layer, and layers that do not run or share their tensors."""

    def to_json(self) -> dict[str, list[str]]:
        """As plain values."""
        return {name: list(layers) for name, layers in asdict(self).items()}


def repair_(
    child: nn.Module,
    parents: Sequence[nn.Module] | Population,
    batches: Sequence[Any],
    weights: Sequence[float] | Tensor | None = None,
    *,
    parent_batches: Sequence[Sequence[Any]] | None = None,
    exact: bool = False,
) -> RepairReport:
    """Give the weighted average of some networks the activation statistics it should have (REPAIR).

    After averaging weights, activations collapse toward their means. For each channel of each convolution and linear
    layer, the child's mean and standard deviation become the parents' weighted means of means and of deviations:

        E[x] = sum_j w_j E[x_j],   std(x) = sum_j w_j std(x_j)

    by rescaling the layer's own weight and bias. Nothing is added to the network. BatchNorm statistics are re-estimated
    on the same batches afterwards. The output layer is left alone.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> from papa.soup import average_soup
        >>> child = average_soup(nets)
        >>> report = repair_(child, nets, [torch.randn(32, 4) for _ in range(5)])
        >>> report.repaired
        ('0',)

    Args:
        child: the average; changed in place, or left untouched when anything goes wrong.
        parents: the networks it is the average of, unchanged; or a population, where all processes that hold members
            must call this, each with its own child.
        batches: inputs, or tuples whose first entry is the inputs; the same for all. Never test data.
        weights: one per parent, summing to 1; equal when None.
        parent_batches: what each parent held here sees instead, such as the same images under its own augmentation.
        exact: go layer by layer until the statistics hold, two passes over the batches for each (more for a layer that
            runs several times), instead of one in all.

    Returns:
        What was done to each layer.
    """
    group: Group = parents.group if isinstance(parents, Population) else LocalGroup()
    members, size = group.members(len(parents)), group.size(len(parents))
    active = parents.active if isinstance(parents, Population) else range(size)
    row = soup_row(size, active) if weights is None else torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if row.shape != (size,):
        raise DataError(f"weights have shape {tuple(row.shape)}, expected ({size},): one for each parent")
    check_row(row, subject="the row of parents' weights")
    batches = rereadable(batches)
    theirs = [batches] * len(parents) if parent_batches is None else parent_batches
    if len(theirs) != len(parents):
        raise DataError(f"parent_batches has {len(theirs)} entries, expected one for each of {len(parents)} parents")
    here = list(zip(members, parents, theirs, strict=True))
    moments = gather_or_raise(
        group,
        lambda: [
            layer_statistics(net, its, subject=f"parent {member}") if row[member] else {} for member, net, its in here
        ],
    )
    return repair_toward_(child, goals_of(moments, row), batches, exact=exact)


def goals_of(moments: Sequence[Mapping[str, ChannelStatistics]], weights: Tensor) -> dict[str, Goal]:
    """The parents' weighted means of means and of standard deviations, layer by layer in the order they ran."""
    used = [(parent, weight) for parent, weight in zip(moments, weights.tolist(), strict=True) if weight]
    first = used[0][0]
    for parent, _ in used:
        if parent.keys() != first.keys():
            odd = sorted(parent.keys() ^ first.keys())[0]
            raise DataError(f"layer '{odd}' runs in some parents only: all must be networks of one architecture")
    return {name: _goal_of(name, [(parent[name], weight) for parent, weight in used]) for name in first}


def _goal_of(name: str, parents: Sequence[tuple[ChannelStatistics, float]]) -> Goal:
    sizes = sorted({len(moments.mean) for moments, _ in parents})
    if len(sizes) > 1:
        raise DataError(f"layer '{name}' has {sizes[0]} channels in one parent and {sizes[-1]} in another")
    num_uses = min(len(moments.uses) for moments, _ in parents)
    return Goal(
        mean=sum((weight * moments.mean for moments, weight in parents), torch.zeros(())),
        std=sum((weight * moments.std for moments, weight in parents), torch.zeros(())),
        uses=tuple(
            _goal_of(name, [(moments.uses[use], weight) for moments, weight in parents]) for use in range(num_uses)
        ),
    )


def repair_plan(model: nn.Module, batches: Sequence[Any]) -> RepairReport:
    """What REPAIR would do to each layer of a network, without doing it.

    Example:
        >>> net = nn.Sequential(nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 2))
        >>> repair_plan(net, [torch.randn(16, 1, 8)]).before_batch_norm
        ('0',)
    """
    layers, feeds = repairable_layers(model), feeds_batch_norm(model, batches)
    # The layer that runs last gives the outputs; it may be one that shares its weights, as heads and embeddings do.
    to_repair = [name for name in list(feeds)[:-1] if name in layers]
    return RepairReport(
        repaired=tuple(name for name in to_repair if has_bias(layers[name])),
        before_batch_norm=tuple(name for name in to_repair if not has_bias(layers[name]) and feeds[name]),
        scaled_only=tuple(name for name in to_repair if not has_bias(layers[name]) and not feeds[name]),
        left_alone=tuple(
            name for name, layer in model.named_modules() if isinstance(layer, LAYERS) and name not in to_repair
        ),
    )


@torch.no_grad()
def repair_toward_(
    child: nn.Module, goals: Mapping[str, Goal], batches: Sequence[Any], *, exact: bool = False, restores: bool = True
) -> RepairReport:
    """REPAIR with goals that are already known; see `repair_`.

    Args:
        child: as for `repair_`.
        goals: what each layer should have.
        batches: as for `repair_`.
        exact: as for `repair_`.
        restores: keep a copy of the layers meanwhile, to leave the child untouched when anything goes wrong; a soup
            that nobody has seen needs none.
    """
    plan = repair_plan(child, batches)
    layers = {name: layer for name, layer in repairable_layers(child).items() if name not in plan.left_alone}
    _check_goals(layers, goals)
    kept = {name: copy.deepcopy(layer.state_dict()) for name, layer in layers.items()} if restores else {}
    try:
        if exact:
            for name in sorted(layers, key=list(goals).index):
                _repair_exactly_(child, name, layers[name], goals[name], batches)
        else:
            for name, found in _rescaled_moments(child, layers, goals, batches).items():
                _fuse_(layers[name], found, goals[name])
        reset_batch_norm_(child, batches)
    except BaseException:
        for name, state in kept.items():
            layers[name].load_state_dict(state)
        raise
    return plan


def _check_goals(layers: Mapping[str, nn.Module], goals: Mapping[str, Goal]) -> None:
    for name, layer in layers.items():
        cure = "child and parents must be networks of one architecture"
        if name not in goals:
            raise DataError(f"layer '{name}' runs in the child, but not in its parents: {cure}")
        found, expected = num_channels(layer), len(goals[name].mean)
        if found != expected:
            raise DataError(f"layer '{name}' has {found} channels in the child, {expected} in its parents: {cure}")


def _repair_exactly_(child: nn.Module, name: str, layer: nn.Module, goal: Goal, batches: Sequence[Any]) -> None:
    """Measure and rescale one layer until its statistics hold; a layer that runs once needs one round."""
    for _ in range(MOST_ROUNDS):
        record = Record()
        run_watched(child, batches, record, {name: layer})
        found = record.moments[name]
        scale, shift = _affine(layer, found, goal)
        if (scale - 1.0).abs().max() < TOLERANCE and (shift.abs() < TOLERANCE * (goal.std + goal.mean.abs())).all():
            return
        _fuse_(layer, found, goal)


def _rescaled_moments(
    child: nn.Module, layers: Mapping[str, nn.Module], goals: Mapping[str, Goal], batches: Sequence[Any]
) -> dict[str, ChannelStatistics]:
    """The child's moments when each layer's output is brought to its goals, batch by batch, before it is passed on."""
    found = {name: ChannelStatistics() for name in layers}

    def watch(name: str, layer: nn.Module, output: Tensor, use: int) -> Tensor:
        found[name].add(layer, output, use)
        here = ChannelStatistics()
        here.add(layer, output)
        uses = goals[name].uses
        scale, shift = _affine(layer, here, uses[use] if use < len(uses) else goals[name])
        shape = [1] * output.dim()
        shape[channel_axis(layer, output)] = -1
        return output * scale.to(output.dtype).view(shape) + shift.to(output.dtype).view(shape)

    run_watched(child, batches, watch, layers)
    return found


def has_bias(layer: nn.Module) -> bool:
    """Whether a layer can shift its output."""
    return layer._parameters.get("bias") is not None


def _affine(layer: nn.Module, found: ChannelStatistics, goal: Goal) -> tuple[Tensor, Tensor]:
    """Scale and shift that bring what was found to the goal, as far as the layer can.

    A channel with no variance keeps scale 1. Where there is no bias to put it into there is no shift, so that what
    comes after sees in the pass what it will see afterwards.
    """
    scale = torch.where((found.std > 0) & (goal.std > 0), goal.std / found.std.clamp(min=1e-300), 1.0)
    shift = goal.mean - scale * found.mean
    return scale, shift if has_bias(layer) else torch.zeros_like(shift)


def _fuse_(layer: nn.Module, found: ChannelStatistics, goal: Goal) -> None:
    """Put scale and shift into the layer's own weight and bias."""
    scale, shift = _affine(layer, found, goal)
    weight = layer.get_parameter("weight")
    if isinstance(layer, _ConvTransposeNd):
        # (in, out/groups, ...): the channels of group g are axis 1 of the g-th part of axis 0.
        groups = weight.view(layer.groups, weight.shape[0] // layer.groups, *weight.shape[1:])
        per_group = scale.view(layer.groups, 1, -1, *[1] * len(layer.kernel_size))
        groups.mul_(per_group.to(weight.dtype))
    else:
        trailing = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
        weight.mul_(scale.view(-1, 1, *[1] * trailing).to(weight.dtype))
    if has_bias(layer):
        bias = layer.get_parameter("bias")
        bias.copy_((scale * bias.double() + shift).to(bias.dtype))
