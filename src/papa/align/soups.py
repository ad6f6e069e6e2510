"""Soups of networks that were trained apart: each is aligned to the growing soup before it joins.

Members are permuted where they live, which does not change what they compute, and put back exactly as they were: so
nobody ever holds another's member, and a soup is a mean of rows like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from papa.align.assignment import Orders
from papa.align.groups import Symmetries
from papa.align.matching import Plan
from papa.align.permute import permute_all_, undoing
from papa.errors import SoupError
from papa.group import gather_or_raise
from papa.mixing import soup_row
from papa.population import Population
from papa.repair import goals_of, layer_statistics, repair_toward_
from papa.repair.statistics import ChannelStatistics
from papa.soup import GreedySoup, MeanNetwork, Score, Trial, is_as_good, mean_network, score_and_loss


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
        members: a population (over several processes, all must call this) or modules of one architecture. Their units
            are permuted meanwhile; afterwards they are what they were, bit for bit, also when anything fails.
        score: as for `greedy_soup`.
        batches: as for `align_`.
        by: as for `align_`.
        groups: as for `align_`.
        repair_batches: on which soups are repaired; None for not.
        seed: of the sequence in which groups are gone through.

    Returns:
        Both soups. No more than two networks of extra memory are held, however many members there are.
    """
    here = list(members)
    if not here:
        raise SoupError("a soup needs at least one network, got none")
    plan = Plan(batches, by=by, groups=groups, seed=seed)
    plan.symmetries_of(here[0])  # before a pot is there: deriving them takes memory of its own
    with _Kitchen(mean_network(members), plan, repair_batches) as evaluation_context:
        readings, order = evaluation_context.pot.ranked(score)
        best = readings[order[0]][0]
        greedy, trials = evaluation_context.soup_of(order[0]), []
        for member in order[1:]:
            candidate = evaluation_context.joined(greedy, member)
            result, _ = score_and_loss(score(evaluation_context.served(candidate)))
            result = evaluation_context.pot.agreed(result)
            trials.append(Trial(tuple(candidate.members), result, is_as_good(result, best)))
            if is_as_good(result, best):
                greedy, best = candidate, result
        average = evaluation_context.soup_of(order[0])
        for member in order[1:]:
            average = evaluation_context.joined(average, member)
        average_network = evaluation_context.served(average)
        evaluation_context.pot = mean_network(members)
        scores = tuple(value for value, _ in readings)
        return AlignedSoups(
            average_network,
            GreedySoup(evaluation_context.served(greedy), tuple(greedy.members), best, scores, tuple(trials)),
        )


@dataclass(frozen=True)
class _Soup:
    """Who is in a soup, how each was permuted, and what REPAIR needs to know of them."""

    members: list[int]
    orders: dict[int, Orders]
    moments: list[dict[str, ChannelStatistics]]


class _Kitchen:
    """Where soups grow; leaving it, every member is put back as it was.

    Args:
        pot: in which they are cooked, one at a time.
        plan: how members are matched.
        repair_batches: on which soups are repaired; None for not.
    """

    def __init__(self, pot: MeanNetwork, plan: Plan, repair_batches: Sequence[Any] | None) -> None:
        self.pot = pot
        self._plan, self._repair_batches = plan, repair_batches
        self._here: dict[int, nn.Module] = pot.local_members
        self._permuted: dict[int, Orders] = {}

    def __enter__(self) -> _Kitchen:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrange({})

    def soup_of(self, member: int) -> _Soup:
        """The soup of one."""
        self._arrange({})
        return _Soup([member], {}, self._moments(member))

    def joined(self, soup: _Soup, member: int) -> _Soup:
        """The soup with one more, aligned to it."""
        self._cook(soup)
        model, subjects = self._here.get(member), ["the soup", f"member {member}"]
        network, plan = self.pot.network, self._plan
        (orders,) = gather_or_raise(
            self.pot.group,
            lambda: [] if model is None else [plan.to_first([network, model], subjects)[0].permutations],
        )
        together = {**soup.orders, member: orders}
        self._arrange(together)
        return _Soup([*soup.members, member], together, soup.moments + self._moments(member))

    def served(self, soup: _Soup) -> nn.Module:
        """The soup, repaired where that was asked for; a soup of one needs none."""
        self._cook(soup)
        if self._repair_batches is not None and len(soup.members) > 1:
            row = soup_row(len(soup.members), range(len(soup.members)))
            repair_toward_(self.pot.network, goals_of(soup.moments, row), self._repair_batches, restores=False)
        network: nn.Module = self.pot.network
        return network

    def _cook(self, soup: _Soup) -> None:
        """Fill the pot with the plain mean."""
        self._arrange(soup.orders)
        self.pot.fill_(soup_row(self.pot.size, soup.members))

    def _arrange(self, orders: dict[int, Orders]) -> None:
        """Permute every member held here as these orders say, starting from how it was."""
        for member, model in self._here.items():
            found, wanted = self._permuted.get(member), orders.get(member)
            if found is wanted:
                continue
            symmetries = self._plan.symmetries_of(model)
            if found is not None:
                permute_all_(model, symmetries, undoing(found))
                del self._permuted[member]
            if wanted is not None:
                permute_all_(model, symmetries, wanted)
                self._permuted[member] = wanted

    def _moments(self, member: int) -> list[dict[str, ChannelStatistics]]:
        batches, model = self._repair_batches, self._here.get(member)
        if batches is None:
            return []
        return gather_or_raise(
            self.pot.group,
            lambda: [] if model is None else [layer_statistics(model, batches, subject=f"member {member}")],
        )
