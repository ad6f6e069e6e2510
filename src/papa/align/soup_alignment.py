"""Soups of independently trained networks: each network is aligned to the growing soup before it joins.

Members are permuted in place on the process that holds them, which does not change their functions, and restored
exactly. So no member is copied between processes, and a soup is a mean of rows like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from papa.align.assignment import Permutations
from papa.align.matching import Matcher
from papa.align.permute import inverses, permute_all_
from papa.align.unit_groups import Symmetries
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
    with _GrowingSoups(mean_network(members), matcher, repair_batches) as soups:
        readings, order = soups.mean.ranked(score, higher_is_better=higher_is_better)
        best = readings[order[0]][0]
        greedy, trials = soups.start(order[0]), []
        for member in order[1:]:
            candidate = soups.joined(greedy, member)
            result = soups.mean.agreed(score_and_loss(score(soups.network(candidate)))[0])
            kept = is_as_good(result, best, higher_is_better=higher_is_better)
            trials.append(Trial(tuple(candidate.members), result, kept))
            if kept:
                greedy, best = candidate, result
        average = soups.start(order[0])
        for member in order[1:]:
            average = soups.joined(average, member)
        average_network = soups.network(average)
        soups.mean = mean_network(members)
        scores = tuple(value for value, _ in readings)
        return AlignedSoups(
            average_network, GreedySoup(soups.network(greedy), tuple(greedy.members), best, scores, tuple(trials))
        )


@dataclass(frozen=True)
class _Soup:
    """The members of a soup, how each is permuted, and their statistics for REPAIR."""

    members: list[int]
    permutations: dict[int, Permutations]
    statistics: list[dict[str, ChannelStatistics]]


class _GrowingSoups:
    """A context in which members are permuted to join soups, one soup at a time; on exit, they are restored."""

    def __init__(self, mean: MeanNetwork, matcher: Matcher, repair_batches: Sequence[Any] | None) -> None:
        self.mean = mean
        self._matcher, self._repair_batches = matcher, repair_batches
        self._local: dict[int, nn.Module] = mean.local_members
        self._permuted: dict[int, Permutations] = {}

    def __enter__(self) -> _GrowingSoups:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrange({})

    def start(self, member: int) -> _Soup:
        """The soup of one member."""
        self._arrange({})
        return _Soup([member], {}, self._statistics(member))

    def joined(self, soup: _Soup, member: int) -> _Soup:
        """The soup with one more member, aligned to it."""
        self._average(soup)
        networks, subjects = [self.mean.network, self._local.get(member)], ["the soup", f"member {member}"]
        (alignment,) = gather_or_raise(
            self.mean.group,
            lambda: self._matcher.match_to_first(networks, subjects) if member in self._local else [],
        )
        permutations = {**soup.permutations, member: alignment.permutations}
        self._arrange(permutations)
        return _Soup([*soup.members, member], permutations, soup.statistics + self._statistics(member))

    def network(self, soup: _Soup) -> nn.Module:
        """The soup's network, repaired if that was requested and it has several members."""
        self._average(soup)
        network: nn.Module = self.mean.network
        if self._repair_batches is not None and len(soup.members) > 1:
            row = soup_row(len(soup.members), range(len(soup.members)))
            repair_toward_(network, goals_of(soup.statistics, row), self._repair_batches, restores=False)
        return network

    def _average(self, soup: _Soup) -> None:
        self._arrange(soup.permutations)
        self.mean.fill_(soup_row(self.mean.size, soup.members))

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

    def _statistics(self, member: int) -> list[dict[str, ChannelStatistics]]:
        batches, model = self._repair_batches, self._local.get(member)
        if batches is None:
            return []
        return gather_or_raise(
            self.mean.group,
            lambda: [] if model is None else [layer_statistics(model, batches, subject=f"member {member}")],
        )
