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

from papa.align.matching import Matcher
from papa.align.permute import Permutations, inverses, permute_all_
from papa.align.unit_groups import Symmetries
from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import GreedySoup, Score, add_greedily, mean_network
from papa.errors import SoupError
from papa.repair import goals_of, layer_statistics, repair_toward_
from papa.repair.statistics import ChannelStatistics


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
            repair_toward_(network, goals_of(statistics, row), self._repair_batches)
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
