"""A recipe: a name, a line of description, a function from a budget to a config, and the paper's tables it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config

BUDGETS = {
    "full": "the paper's setting",
    "mini": "ten to twenty minutes on two CPU cores",
    "smoke": "seconds: to see that everything works",
}


@dataclass(frozen=True)
class Recipe:
    """A named configuration."""

    name: str
    summary: str
    """One line for listings."""
    make: Callable[[str], Config]
    """From a budget to the configuration."""
    table: str = ""
    """The labels of the paper's tables that it belongs to, separated by commas."""
    default_budget: str = "full"

    def config(self, budget: str | None = None) -> Config:
        """The recipe's configuration under a budget, with its name written into it."""
        budget = budget or self.default_budget
        if budget not in BUDGETS:
            raise ConfigError(f"--budget is {budget}: {did_you_mean(budget, BUDGETS)}")
        return replace(self.make(budget), recipe=self.name)
