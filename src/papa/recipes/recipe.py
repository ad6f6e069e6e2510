"""What a recipe is: a name, a sentence, and a function that returns a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from papa.config import Config


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration."""

    name: str
    summary: str
    """One line for listings."""
    make: Callable[[], Config]

    def config(self) -> Config:
        """The recipe's configuration, with its name written into it."""
        return replace(self.make(), recipe=self.name)
