"""What a recipe is: a name, a sentence, a function from a budget to a config, and the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config

BUDGETS = {
    "full": "the paper's setting",
    "mini": "ten to twenty minutes on two CPU cores",
    "smoke": "seconds: to see that everything works",
}

PaperScores: TypeAlias = Mapping[str, float]
"""The paper's scores by the names of `result.json`: mean, ensemble, average_soup, greedy_soup."""

PaperDetails: TypeAlias = Mapping[str, Mapping[str, float]]
"""The same with the details of each score, by the names under `details` in `result.json`."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration."""

    name: str
    summary: str
    """One line for listings."""
    table: str = ""
    """The label of the paper's table that it belongs to."""
    make: Callable[[str], Config]
    """From a budget to the configuration."""
    paper: Mapping[tuple[str, str, int], PaperScores] = field(default_factory=dict)
    """The paper's scores by (method, grid, members)."""
    paper_details: Mapping[tuple[str, str, int], PaperDetails] = field(default_factory=dict)
    """What else the paper tells of these scores, such as the score of each class, by the same."""
    paper_soups: str | None = None
    """Which soups of independent members the paper's are: `repaired`, `aligned` (and repaired); None for plain ones."""
    default_budget: str = "full"

    def config(self, budget: str | None = None) -> Config:
        """The recipe's configuration under a budget, with its name written into it."""
        budget = budget or self.default_budget
        if budget not in BUDGETS:
            raise ConfigError(f"--budget is {budget}: {did_you_mean(budget, BUDGETS)}")
        return replace(self.make(budget), recipe=self.name)

    def paper_scores(self, config: Config) -> PaperScores | None:
        """What the paper reports for this configuration's method, grid and population size."""
        return self.paper.get((config.method, config.diversity.grid, config.members))
