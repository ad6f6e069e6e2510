"""Scores of members, ensemble and soups on one set of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from papa.evaluation.scores import Evaluation


@dataclass(frozen=True)
class Scores:
    """Scores of members, ensemble and soups on one set of data."""

    members: list[Evaluation]
    ensemble: Evaluation
    average_soup: Evaluation
    greedy_soup: Evaluation
    dropped: frozenset[int] = frozenset()
    """Dropped members, which do not count."""

    @property
    def mean(self) -> float:
        """The members' mean score."""
        return sum(self.counted) / len(self.counted)

    @property
    def counted(self) -> list[float]:
        """The scores of the members that were not dropped."""
        return [found.score for member, found in enumerate(self.members) if member not in self.dropped]

    def to_json(self) -> dict[str, Any]:
        """As in `result.json`; losses have their own key."""
        return {
            "members": [member.score for member in self.members],
            "mean": self.mean,
            "min": min(self.counted),
            "max": max(self.counted),
            "ensemble": self.ensemble.score,
            "average_soup": self.average_soup.score,
            "greedy_soup": self.greedy_soup.score,
            "loss": {
                "members": [member.loss for member in self.members],
                "ensemble": self.ensemble.loss,
                "average_soup": self.average_soup.loss,
                "greedy_soup": self.greedy_soup.loss,
            },
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """Additional values of the metric, such as scores by class."""
        members = [member.details for member in self.members if member.details]
        if not members:
            return {}
        mean = {name: sum(member[name] for member in members) / len(members) for name in members[0]}
        others = {"ensemble": self.ensemble, "average_soup": self.average_soup, "greedy_soup": self.greedy_soup}
        return {
            "details": {"members": members, "mean": mean, **{name: value.details for name, value in others.items()}}
        }
