"""REPAIR: give an averaged network the activation statistics of the networks that it is the average of."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from papa.core.group import Group, LocalGroup, gather_or_raise
from papa.core.layout import named_tensors
from papa.core.mixing import check_row, soup_row
from papa.core.population import Population
from papa.core.rules import AveragingContext
from papa.core.soups import After
from papa.errors import DataError
from papa.evaluation.scores import rereadable
from papa.repair.consumers import feeds_activation, feeds_batch_norm
from papa.repair.statistics import (
    ChannelStatistics,
    all_layers,
    channel_axis,
    layer_statistics,
    num_channels,
    repairable_layers,
    reset_batch_norm_,
    run_with_hook,
)

Scope: TypeAlias = Literal["all", "activations"]
"""The layers that are repaired: `all` convolutions and linear layers, or those that stand before `activations`: before
an activation function, which is how the paper describes REPAIR, or before BatchNorm. The two are the same in networks
such as VGG and ResNet. A transformer's attention projections and the last layers of its MLPs are in `all` only."""

BatchesFor: TypeAlias = Callable[[int], Sequence[Any]]
"""From a member's index to the batches on which its statistics are computed."""


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
    """Layers without a bias that feed BatchNorm, which subtracts any mean: they get the standard deviations."""
    scaled_only: tuple[str, ...]
    """Layers with neither a bias nor BatchNorm after them: they get the standard deviations, their means stay wrong."""
    left_alone: tuple[str, ...]
    """The output layer, layers outside the scope, and layers that do not run or share their tensors."""

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
    scope: Scope = "all",
) -> RepairReport:
    """Give the weighted average of some networks the activation statistics of these networks (REPAIR).

    Averaging weights makes activations collapse toward their means. For each channel of each convolution and linear
    layer, the child's mean and standard deviation become the weighted means of the parents' means and deviations:

        E[x] = sum_j w_j E[x_j],   std(x) = sum_j w_j std(x_j)

    This rescales the layer's own weight and bias; nothing is added to the network. BatchNorm statistics are then
    re-estimated on the same batches. The output layer is left alone.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> from papa.core.soups import average_soup
        >>> child = average_soup(nets)
        >>> report = repair_(child, nets, [torch.randn(32, 4) for _ in range(5)])
        >>> report.repaired
        ('0',)

    Args:
        child: the average; changed in place, or unchanged when an error is raised.
        parents: the networks that it is the average of; or a population, in which case every process of its group must
            call this, each with its own child.
        batches: inputs, or tuples with the inputs first; the same for all networks. Never test data.
        weights: one per parent, summing to 1; equal when None.
        parent_batches: one list of batches for each local parent, used instead of `batches` for the parents, such as
            the same images under each parent's own augmentation.
        scope: the layers that are repaired, see `Scope`.

    Returns:
        What was done to each layer.
    """
    size = parents.size if isinstance(parents, Population) else len(parents)
    active = parents.active if isinstance(parents, Population) else range(size)
    row = soup_row(size, active) if weights is None else torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if row.shape != (size,):
        raise DataError(f"weights have shape {tuple(row.shape)}, expected ({size},): one for each parent")
    check_row(row, subject="the row of parents' weights")
    batches = rereadable(batches)
    theirs = [batches] * len(parents) if parent_batches is None else parent_batches
    if len(theirs) != len(parents):
        raise DataError(f"parent_batches has {len(theirs)} entries, expected one for each of {len(parents)} parents")
    statistics = statistics_of(parents, theirs, row.nonzero().flatten().tolist(), subject="parent")
    return repair_toward_(child, goals_of(statistics, row), batches, scope=scope)


def repair_toward_members(
    parents: Population | Sequence[nn.Module],
    members: Collection[int],
    batches: Sequence[Any],
    *,
    scope: Scope = "all",
) -> After:
    """A function for `after` that repairs averages of some members toward the statistics that these have now."""
    statistics = statistics_of(parents, [batches] * len(parents), members)

    def repair(network: nn.Module, row: Tensor) -> None:
        repair_toward_(network, goals_of(statistics, row), batches, scope=scope, restores=False)

    return repair


def statistics_of(
    parents: Population | Sequence[nn.Module],
    batches: Sequence[Sequence[Any]],
    members: Collection[int],
    *,
    subject: str = "member",
) -> list[dict[str, ChannelStatistics]]:
    """The statistics of some members, gathered from all processes; empty for the others.

    `batches` has one list for each parent on this process.
    """
    group: Group = parents.group if isinstance(parents, Population) else LocalGroup()
    local = list(zip(group.members(len(parents)), parents, batches, strict=True))
    return gather_or_raise(
        group,
        lambda: [
            layer_statistics(net, its, subject=f"{subject} {member}") if member in members else {}
            for member, net, its in local
        ],
    )


def goals_of(statistics: Sequence[Mapping[str, ChannelStatistics]], weights: Tensor) -> dict[str, Goal]:
    """The weighted means of the parents' means and standard deviations, by layer, in the order the layers ran."""
    used = [(parent, weight) for parent, weight in zip(statistics, weights.tolist(), strict=True) if weight]
    first = used[0][0]
    for parent, _ in used:
        if parent.keys() != first.keys():
            odd = sorted(parent.keys() ^ first.keys())[0]
            raise DataError(f"layer '{odd}' runs in some parents only: all must be networks of one architecture")
    return {name: _goal_of(name, [(parent[name], weight) for parent, weight in used]) for name in first}


def _goal_of(name: str, parents: Sequence[tuple[ChannelStatistics, float]]) -> Goal:
    sizes = sorted({len(found.mean) for found, _ in parents})
    if len(sizes) > 1:
        raise DataError(f"layer '{name}' has {sizes[0]} channels in one parent and {sizes[-1]} in another")
    num_uses = min(len(found.uses) for found, _ in parents)
    zero = torch.zeros((), device=parents[0][0].mean.device)
    return Goal(
        mean=sum((weight * found.mean for found, weight in parents), zero),
        std=sum((weight * found.std for found, weight in parents), zero),
        uses=tuple(_goal_of(name, [(found.uses[use], weight) for found, weight in parents]) for use in range(num_uses)),
    )


def repair_plan(model: nn.Module, batches: Sequence[Any], *, scope: Scope = "all") -> RepairReport:
    """What REPAIR would do to each layer of a network, without doing it.

    Example:
        >>> net = nn.Sequential(nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 2))
        >>> repair_plan(net, [torch.randn(16, 1, 8)]).before_batch_norm
        ('0',)
    """
    layers, feeds = repairable_layers(model), feeds_batch_norm(model, batches)
    # The layer that runs last gives the outputs; it may share its weights with another, as heads and embeddings do.
    to_repair = [name for name in list(feeds)[:-1] if name in layers]
    if scope == "activations":
        activated = feeds_activation(model, batches)
        to_repair = [name for name in to_repair if feeds[name] or name in activated]
    return RepairReport(
        repaired=tuple(name for name in to_repair if _has_bias(layers[name])),
        before_batch_norm=tuple(name for name in to_repair if not _has_bias(layers[name]) and feeds[name]),
        scaled_only=tuple(name for name in to_repair if not _has_bias(layers[name]) and not feeds[name]),
        left_alone=tuple(name for name in all_layers(model) if name not in to_repair),
    )


@torch.no_grad()
def repair_toward_(
    child: nn.Module,
    goals: Mapping[str, Goal],
    batches: Sequence[Any],
    *,
    scope: Scope = "all",
    restores: bool = True,
) -> RepairReport:
    """REPAIR with the goals of each layer, from `goals_of`; see `repair_`.

    `restores` keeps a copy of the layers meanwhile, to restore them when an error is raised. It is not needed for a
    network that is thrown away after an error.
    """
    plan = repair_plan(child, batches, scope=scope)
    layers = {name: layer for name, layer in repairable_layers(child).items() if name not in plan.left_alone}
    for name, layer in layers.items():
        cure = "child and parents must be networks of one architecture"
        if name not in goals:
            raise DataError(f"layer '{name}' runs in the child, but not in its parents: {cure}")
        size, expected = num_channels(layer), len(goals[name].mean)
        if size != expected:
            raise DataError(f"layer '{name}' has {size} channels in the child, {expected} in its parents: {cure}")
    kept = {name: copy.deepcopy(layer.state_dict()) for name, layer in layers.items()} if restores else {}
    try:
        for name, found in _rescaled_statistics(child, layers, goals, batches).items():
            _fuse_(layers[name], found, goals[name])
        reset_batch_norm_(child, batches)
    except BaseException:
        for name, state in kept.items():
            layers[name].load_state_dict(state)
        raise
    return plan


def _rescaled_statistics(
    child: nn.Module, layers: Mapping[str, nn.Module], goals: Mapping[str, Goal], batches: Sequence[Any]
) -> dict[str, ChannelStatistics]:
    """The child's statistics when each layer's output is rescaled to its goals, batch by batch."""
    found = {name: ChannelStatistics() for name in layers}

    def rescale(name: str, layer: nn.Module, output: Tensor, use: int) -> Tensor:
        found[name].add(layer, output, use)
        batch = ChannelStatistics()
        batch.add(layer, output)
        uses = goals[name].uses
        scale, shift = _affine(layer, batch, uses[use] if use < len(uses) else goals[name])
        shape = [1] * output.dim()
        shape[channel_axis(layer, output)] = -1
        return output * scale.to(output.dtype).view(shape) + shift.to(output.dtype).view(shape)

    run_with_hook(child, batches, rescale, layers)
    return found


def _has_bias(layer: nn.Module) -> bool:
    return layer._parameters.get("bias") is not None


def _affine(layer: nn.Module, found: ChannelStatistics, goal: Goal) -> tuple[Tensor, Tensor]:
    """The scale and shift from the found statistics to the goal; no shift for a layer without a bias to hold it.

    A channel without variance keeps scale 1.
    """
    scale = torch.where((found.std > 0) & (goal.std > 0), goal.std / found.std.clamp(min=1e-300), 1.0)
    shift = goal.mean - scale * found.mean
    return scale, shift if _has_bias(layer) else torch.zeros_like(shift)


def _fuse_(layer: nn.Module, found: ChannelStatistics, goal: Goal) -> None:
    """Multiply scale and shift into the layer's own weight and bias."""
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
    if _has_bias(layer):
        bias = layer.get_parameter("bias")
        bias.copy_((scale * bias.double() + shift).to(bias.dtype))


class RepairMerges:
    """A merge hook that repairs every member after a merge; passed to an `Averager` as `merge_hooks`.

    The members before the merge are the parents, the members after it the children.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> batches = [torch.randn(32, 4) for _ in range(5)]
        >>> repair = RepairMerges(lambda member: batches)
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=repair)
        >>> averager.step().rule
        'MergeAll'

    Args:
        batches_for: the batches for a member's statistics. Either the same examples for all members, each under its
            own augmentation (the paper's algorithm: two passes for each member), or one list for all (one pass for
            each member and one for each distinct child).
        scope: as for `repair_`.
    """

    def __init__(self, batches_for: BatchesFor, *, scope: Scope = "all") -> None:
        self.batches_for, self.scope = batches_for, scope

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Compute the parents' statistics before the merge, and repair the children after it."""
        batches = [self.batches_for(member) for member in population.members]
        parents = statistics_of(population, batches, range(population.size))
        yield
        for index, row in _distinct_children(population, matrix, batches):
            repair_toward_(population[index], goals_of(parents, row), batches[index], scope=self.scope)


class ResetBatchNormAfterMerges:
    """A merge hook that re-estimates every member's BatchNorm statistics after a merge, and changes nothing else.

    In a network with BatchNorm after every convolution, REPAIR gives networks that compute the same. This needs one
    pass over the batches for each distinct child and none for the parents. REPAIR also rescales the weights, which
    there only changes the relative size of the next optimizer steps. `batches_for` is as for `RepairMerges`.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> batches = [torch.randn(32, 4) for _ in range(5)]
        >>> reset = ResetBatchNormAfterMerges(lambda member: batches)
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=reset)
    """

    def __init__(self, batches_for: BatchesFor) -> None:
        self.batches_for = batches_for

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Re-estimate after the merge."""
        yield
        batches = [self.batches_for(member) for member in population.members]
        for index, _ in _distinct_children(population, matrix, batches):
            reset_batch_norm_(population[index], batches[index])


def _distinct_children(
    population: Population, matrix: Tensor, batches: Sequence[Sequence[Any]]
) -> Iterator[tuple[int, Tensor]]:
    """The index and row of each distinct local child, for the caller to repair; the others become copies of these.

    Children with equal rows and the same batches are equal. A copy of one member needs no repair.
    """
    first: dict[tuple[int, tuple[float, ...]], int] = {}
    for index, member in enumerate(population.members):
        row = matrix[member]
        if int(row.count_nonzero()) == 1:
            continue
        twin = first.setdefault((id(batches[index]), tuple(row.tolist())), index)
        if twin == index:
            yield index, row
        else:
            with torch.no_grad():
                source = named_tensors(population[twin])
                for name, tensor in named_tensors(population[index], population.averaged).items():
                    tensor.copy_(source[name])
