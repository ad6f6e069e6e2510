"""Aligning networks: one to another, many to the first, members before they are merged, or as they join a soup."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.align.matching import Alignment, Matcher, identity
from papa.align.unit_groups import Permutations, Symmetries, inverses, permute_all_
from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.rules import AveragingContext
from papa.core.soups import GreedySoup, Score, add_greedily, mean_network
from papa.errors import MixingError, PapaError, SoupError
from papa.repair import goals_of, layer_statistics, repair_toward_
from papa.repair.statistics import ChannelStatistics


@torch.no_grad()
def align_(
    model: nn.Module,
    reference: nn.Module,
    batches: Any = None,
    *,
    by: str | None = None,
    symmetries: Symmetries | None = None,
    optimizer: Optimizer | None = None,
    seed: int = 0,
) -> Alignment:
    """Permute a network's units to match another network, without changing its function.

    - by `"activations"`: maximise the correlation of paired units, summed over all nodes of the graph that have them.
    - by `"weights"`: maximise the sum over tensors of `<reference, P model> / (|reference| |model|)`.
    - by `"sinkhorn"`: the objective of weights, over soft permutations that harden while a temperature falls.

    The first two give each group in turn its best permutation, a linear assignment, until nothing is gained. Units
    inside blocks (attention heads, groups of channels) are matched in each pair of blocks first, then the blocks.

    Example:
        >>> reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> alignment = align_(model, reference, [torch.randn(32, 4) for _ in range(2)])
        >>> alignment.after >= alignment.before
        True
        >>> alignment = align_(model, reference, torch.randn(3, 4), by="weights")

    Args:
        model: the network to permute in place; its tensors keep their memory; unchanged if an error is raised.
        reference: the network to match, unchanged.
        batches: inputs, or tuples that start with the inputs, all of one shape (a smaller last one is left out), never
            test data; or one tensor, an example from which the symmetries are derived. Optional when matching by
            weights with given `symmetries`.
        by: `"activations"`, `"weights"` or `"sinkhorn"`; by default activations for a list of batches, else weights.
        symmetries: the result of `papa.symmetries` for this architecture and inputs of this shape; None to derive them.
        optimizer: the model's; its state is permuted with the parameters.
        seed: of the order in which groups are matched.

    Returns:
        How similar the networks are before and after, and the permutations.
    """
    matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)
    (alignment,) = matcher.match_to_first([reference, model], subjects=["the reference", "the model"])
    permute_all_(model, matcher.symmetries_of(model), alignment.permutations, optimizer=optimizer)
    return alignment


@torch.no_grad()
def align_all_(
    models: Sequence[nn.Module] | Population,
    batches: Any = None,
    *,
    by: str | None = None,
    symmetries: Symmetries | None = None,
    optimizers: Sequence[Optimizer] = (),
    seed: int = 0,
) -> list[Alignment]:
    """Permute the units of many networks to match the first, without changing their functions.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> alignments = align_all_(nets, [torch.randn(32, 4)])
        >>> len(alignments)
        3

    Args:
        models: networks of one architecture, or a population; if several processes hold it, all must call this. None
            is changed if an error is raised.
        batches: as for `align_`; one pass over them serves all.
        by: as for `align_`.
        symmetries: as for `align_`.
        optimizers: one for each network, to permute their state with the parameters; or none.
        seed: as for `align_`.

    Returns:
        For each network on this process, its similarity to the first.
    """
    networks = list(models)
    _check_optimizers(optimizers, networks)
    matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)
    if isinstance(models, Population):
        found = match_to_member(models, 0, range(1, models.size), matcher)
    else:
        subjects = [f"member {member}" for member in range(len(networks))]
        found = dict(enumerate(matcher.match_to_first(networks, subjects), start=1))
    _permute_(networks, found, matcher, optimizers)
    unchanged = Alignment(1.0, 1.0, 0, identity(matcher.symmetries_of(networks[0])) if networks else {})
    return [found.get(index, unchanged) for index in range(len(networks))]


def match_to_member(
    population: Population, reference: int, members: Collection[int], matcher: Matcher
) -> dict[int, Alignment]:
    """Find permutations of some members that match them to another member, on whichever process it is.

    No member is changed. Every process that holds members must call this; it takes the memory of one more network.
    Members have their index in the whole population, the alignments of those on this process their local index.
    """
    matcher.symmetries_of(population[0])  # deriving them takes memory: do it before there is a copy
    local = [index for index, member in enumerate(population.members) if member in members]
    copy_of_reference = mean_network(population)
    copy_of_reference.fill_(soup_row(population.size, [reference]))
    subjects = [f"member {member}" for member in (reference, *(population.members[index] for index in local))]
    alignments: list[Alignment] = []

    def match() -> list[None]:
        if local:
            networks = [copy_of_reference.network, *(population[index] for index in local)]
            alignments.extend(matcher.match_to_first(networks, subjects))
        return []

    gather_or_raise(population.group, match)
    return dict(zip(local, alignments, strict=True))


def _check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module] | Population) -> None:
    if optimizers and len(optimizers) != len(models):
        raise PapaError(
            f"alignment was given {len(optimizers)} optimizers for {len(models)} networks, expected one for each "
            "network on this process"
        )


def _permute_(
    models: Sequence[nn.Module] | Population,
    alignments: Mapping[int, Alignment],
    matcher: Matcher,
    optimizers: Sequence[Optimizer],
) -> None:
    for index, alignment in alignments.items():
        optimizer = optimizers[index] if optimizers else None
        permute_all_(models[index], matcher.symmetries_of(models[index]), alignment.permutations, optimizer=optimizer)


class AlignMerges:
    """A merge hook for `Averager` that aligns every member to the first before members are averaged.

    The symmetries are derived once. Members may be on several processes.

    Example:
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> align = AlignMerges([torch.randn(32, 4) for _ in range(5)])
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=align)
        >>> averager.step().rule
        'MergeAll'
        >>> [alignment.after >= alignment.before for alignment in align.alignments]
        [True, True]

    Args:
        batches: as for `align_`: the same for all members and all merges.
        by: as for `align_`.
        symmetries: as for `align_`.
        optimizers: one for each member on this process, to permute their state (such as momentum) with the parameters;
            without them it stays in place, as in the paper's published code, and belongs to other units than before.
        every_steps: align only at the first averaging of every `every_steps` steps; 1 for every averaging.
        seed: as for `align_`.
    """

    def __init__(
        self,
        batches: Any = None,
        *,
        by: str | None = None,
        symmetries: Symmetries | None = None,
        optimizers: Iterable[Optimizer] = (),
        every_steps: int = 1,
        seed: int = 0,
    ) -> None:
        if every_steps < 1:
            raise MixingError(f"every_steps is {every_steps}, expected a number of steps, at least 1")
        self.every_steps = every_steps
        self.alignments: list[Alignment] = []
        """The last alignments of the members on this process, without the first member."""
        self._optimizers = list(optimizers)
        self._matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Align if it is time, before the members are averaged."""
        if context.is_first_since(self.every_steps):
            self.align_(population)
        yield

    @torch.no_grad()
    def align_(self, population: Population) -> None:
        """Align every member to the first now; every process that holds members must call this."""
        _check_optimizers(self._optimizers, population)
        found = match_to_member(population, 0, range(1, population.size), self._matcher)
        self.alignments = list(found.values())
        _permute_(population, found, self._matcher, self._optimizers)


@dataclass(frozen=True)
class AlignedSoups:
    """An average soup and a greedy soup of aligned members."""

    average: nn.Module
    """The mean of all, each aligned to the mean of those before it."""
    greedy: GreedySoup[nn.Module]
    """The greedy soup, each candidate aligned to the soup it may join."""


@torch.no_grad()
def aligned_soups(
    members: Population | Sequence[nn.Module],
    score: Score,
    batches: Any = None,
    *,
    by: str | None = None,
    symmetries: Symmetries | None = None,
    repair_batches: Sequence[Any] | None = None,
    seed: int = 0,
    higher_is_better: bool = True,
) -> AlignedSoups:
    """The average soup and the greedy soup, each member aligned to the growing soup before it joins.

    Members are added in the order of their scores, best first, as the paper does for independent networks. With
    `repair_batches`, every average is repaired (REPAIR) toward its aligned members before it is scored or returned;
    members are aligned to the plain mean.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> soups = aligned_soups(nets, lambda net: -net[0].weight.norm().item(), [torch.randn(32, 4)])
        >>> len(soups.greedy.trials)
        2

    Args:
        members: a population (if several processes hold it, all must call this) or modules of one architecture. Their
            units are permuted while this runs; afterwards they are restored bit for bit, also after an error.
        score: as for `greedy_soup`.
        batches: as for `align_`.
        by: as for `align_`.
        symmetries: as for `align_`.
        repair_batches: batches on which soups are repaired; None for no REPAIR.
        seed: as for `align_`.
        higher_is_better: as for `greedy_soup`.

    Returns:
        Both soups. At most two more networks are in memory, for any number of members.
    """
    local = list(members)
    if not local:
        raise SoupError("a soup needs at least one network, got none")
    matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)
    matcher.symmetries_of(local[0])  # deriving them takes memory: do it before there is a soup
    with _AlignedMeans(members, matcher, repair_batches) as means:
        readings, order = means.mean.ranked(score, higher_is_better=higher_is_better)
        chosen, best, trials = add_greedily(
            order,
            readings[order[0]][0],
            lambda candidate: means.mean.agreed(score(means.network(candidate))),
            higher_is_better=higher_is_better,
        )
        average = means.network(order)
        means.mean = mean_network(members)
        scores = tuple(value for value, _ in readings)
        return AlignedSoups(average, GreedySoup(means.network(chosen), tuple(chosen), best, scores, trials))


class _AlignedMeans:
    """A context in which members are permuted to join means, one mean at a time; on exit, they are restored.

    How a member is permuted depends on the members before it only, so this is kept by sequence of members.
    """

    def __init__(
        self, members: Population | Sequence[nn.Module], matcher: Matcher, repair_batches: Sequence[Any] | None
    ) -> None:
        self.mean = mean_network(members)
        self._matcher, self._repair_batches = matcher, repair_batches
        self._local: dict[int, nn.Module] = self.mean.local_members
        self._permuted: dict[int, Permutations] = {}
        self._permutations: dict[tuple[int, ...], dict[int, Permutations]] = {}
        self._statistics: dict[tuple[int, ...], dict[str, ChannelStatistics]] = {}

    def __enter__(self) -> _AlignedMeans:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrange({})

    def network(self, members: Sequence[int]) -> nn.Module:
        """The mean of some members, each aligned to the mean of those before it; several are repaired if requested."""
        self._fill(tuple(members))
        network: nn.Module = self.mean.network
        if self._repair_batches is not None and len(members) > 1:
            statistics = [self._statistics_of_last(tuple(members[: size + 1])) for size in range(len(members))]
            row = soup_row(len(members), range(len(members)))
            repair_toward_(network, goals_of(statistics, row), self._repair_batches, restores=False)
        return network

    def _fill(self, members: tuple[int, ...]) -> dict[int, Permutations]:
        if len(members) > 1 and members not in self._permutations:
            others, last = self._fill(members[:-1]), members[-1]
            networks, subjects = [self.mean.network, self._local.get(last)], ["the soup", f"member {last}"]
            (alignment,) = gather_or_raise(
                self.mean.group, lambda: self._matcher.match_to_first(networks, subjects) if last in self._local else []
            )
            self._permutations[members] = {**others, last: alignment.permutations}
        permutations = self._permutations.get(members, {})
        self._arrange(permutations)
        self.mean.fill_(soup_row(self.mean.size, members))
        return permutations

    def _arrange(self, permutations: dict[int, Permutations]) -> None:
        """Permute every member on this process in this way, starting from its original order."""
        for member, model in self._local.items():
            found, wanted = self._permuted.get(member), permutations.get(member)
            if found is wanted:
                continue
            symmetries = self._matcher.symmetries_of(model)
            if found is not None:
                permute_all_(model, symmetries, inverses(found))
                del self._permuted[member]
            if wanted is not None:
                permute_all_(model, symmetries, wanted)
                self._permuted[member] = wanted

    def _statistics_of_last(self, members: tuple[int, ...]) -> dict[str, ChannelStatistics]:
        """The statistics of the last of some members, which must be permuted to join the others."""
        if members not in self._statistics:
            member, batches = members[-1], self._repair_batches or []
            model = self._local.get(member)
            (self._statistics[members],) = gather_or_raise(
                self.mean.group,
                lambda: [] if model is None else [layer_statistics(model, batches, subject=f"member {member}")],
            )
        return self._statistics[members]
