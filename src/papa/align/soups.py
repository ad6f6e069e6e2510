"""Soups of networks that were trained apart: each is aligned to the growing soup before it joins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa import flat
from papa.align.groups import Symmetries
from papa.align.matching import Plan
from papa.align.merging import fetched
from papa.align.permute import permute_all_
from papa.errors import SoupError
from papa.mixing import soup_row
from papa.population import Population
from papa.repair import goals_of, layer_moments, repair_toward_
from papa.repair.moments import Moments
from papa.soup import GreedySoup, Score, Trial, reading


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
    groups: Symmetries | None = None,
    repair_batches: Sequence[Any] | None = None,
    seed: int = 0,
) -> AlignedSoups:
    """The average soup and the greedy soup, each member aligned to the growing soup before it joins.

    Members are taken in the order of their scores, best first, as the paper does for networks trained apart. With
    `repair_batches`, every average is repaired (REPAIR) toward its aligned members before it is scored or handed back;
    what members are aligned to is the plain mean.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> soups = aligned_soups(nets, lambda net: -net[0].weight.norm().item(), [torch.randn(32, 4)])
        >>> len(soups.greedy.trials)
        2

    Args:
        members: a population (over several processes, all must call this) or modules of one architecture; unchanged.
        score: as for `greedy_soup`.
        batches: as for `align_`.
        by: as for `align_`.
        groups: as for `align_`.
        repair_batches: on which soups are repaired; None for not.
        seed: of the sequence in which groups are gone through.

    Returns:
        Both soups. A few networks of extra memory are held, however many members there are.
    """
    population = members if isinstance(members, Population) else None
    here = list(members)
    if not here:
        raise SoupError("a soup needs at least one network, got none")
    fetch: Callable[[int], nn.Module] = (
        (lambda member: copy.deepcopy(here[member]))
        if population is None
        else (lambda member: fetched(population, member))
    )
    values = [score(member) for member in here]
    values = values if population is None else population.group.gather(values)
    readings = [reading(value, f"member {index}") for index, value in enumerate(values)]
    order = sorted(range(len(readings)), key=lambda index: (-readings[index][0], readings[index][1], index))
    plan = Plan(batches, by=by, groups=groups, seed=seed)
    names = [slot.name for slot in flat.plan(here, {}).slots] if population is None else list(population.averaged)
    kitchen = _Kitchen(fetch, plan, names, len(readings), repair_batches)

    average = kitchen.start(order[0])
    for member in order[1:]:
        average = kitchen.with_member(average, member)

    greedy, best, trials = kitchen.start(order[0]), readings[order[0]][0], []
    for member in order[1:]:
        candidate = kitchen.with_member(greedy, member)
        result, _ = reading(score(kitchen.served(candidate)), f"the soup of members {candidate.members}")
        trials.append(Trial(tuple(candidate.members), result, result >= best))
        if result >= best:
            greedy, best = candidate, result
    scores = tuple(value for value, _ in readings)
    return AlignedSoups(
        kitchen.served(average),
        GreedySoup(kitchen.served(greedy), tuple(greedy.members), best, scores, tuple(trials)),
    )


@dataclass(frozen=True)
class _Soup:
    """The plain mean of aligned members, and what REPAIR needs to know of them."""

    network: nn.Module
    members: list[int]
    moments: list[dict[str, Moments]]


class _Kitchen:
    """Where soups grow."""

    def __init__(
        self,
        fetch: Callable[[int], nn.Module],
        plan: Plan,
        names: list[str],
        size: int,
        repair_batches: Sequence[Any] | None,
    ) -> None:
        self._fetch, self._plan, self._names, self._size = fetch, plan, names, size
        self._repair_batches = repair_batches

    def start(self, member: int) -> _Soup:
        """The soup of one."""
        network = self._fetch(member)
        return _Soup(network, [member], self._moments(network, member))

    def with_member(self, soup: _Soup, member: int) -> _Soup:
        """The soup with one more, aligned to it."""
        newcomer = self._fetch(member)
        (alignment,) = self._plan.to_first([soup.network, newcomer], ["the soup", f"member {member}"])
        permute_all_(newcomer, self._plan.symmetries_of(newcomer), alignment.permutations)
        moments = self._moments(newcomer, member)
        mine, theirs = (flat.named_tensors(network, self._names) for network in (newcomer, soup.network))
        for name, tensor in mine.items():
            tensor.copy_(_mean(theirs[name], tensor, len(soup.members)))
        return _Soup(newcomer, [*soup.members, member], soup.moments + moments)

    def served(self, soup: _Soup) -> nn.Module:
        """The soup, repaired where that was asked for; a soup of one needs none."""
        if self._repair_batches is None or len(soup.members) == 1:
            return soup.network
        network, row = copy.deepcopy(soup.network), soup_row(len(soup.members), range(len(soup.members)))
        repair_toward_(network, goals_of(soup.moments, row), self._repair_batches)
        return network

    def _moments(self, network: nn.Module, member: int) -> list[dict[str, Moments]]:
        if self._repair_batches is None:
            return []
        return [layer_moments(network, self._repair_batches, subject=f"member {member}")]


def _mean(soup: Tensor, newcomer: Tensor, num_members: int) -> Tensor:
    """The mean of `num_members` in the soup and one more, in float64."""
    wide = torch.promote_types(soup.dtype, torch.float64)
    return (soup.to(wide) * num_members + newcomer.to(soup.device, wide)) / (num_members + 1)
