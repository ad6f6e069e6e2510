"""What an averaging reports, and hooks that run around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from papa.core.health import NonFiniteMember
from papa.core.population import Population
from papa.core.rules import AveragingContext

MergeHook: TypeAlias = Callable[[Population, Tensor, AveragingContext], AbstractContextManager[None]]
"""Code to run right before and right after members are mixed: a function that returns a context manager.

It is given the population, the mixing matrix and the context of the averaging."""


@dataclass(frozen=True)
class Averaging:
    """What one averaging did, for logs."""

    step: int
    """The optimizer step after which it happened, counted across epochs."""
    rule: str
    """The rule's name."""
    alpha: float | None
    """For a push toward the mean, the share of itself each member kept; None for other rules."""
    distances_before: tuple[float, ...] | None
    """Each member's distance to the mean before; None if not measured."""
    after: Tensor | tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    """What `distances_after` reads."""
    nonfinite: tuple[NonFiniteMember, ...] = ()
    """Members that were found non-finite right before, and what was done."""
    bytes: int = field(default=0, compare=False)
    """The number of bytes this process sent to others."""
    seconds: float = field(default=0.0, compare=False)
    """How long training waited for it in this process."""
    decision: Mapping[str, Any] | None = None
    """What a rule that decides by what it sees remembers from now on, such as its new strength; None if unchanged."""

    @functools.cached_property
    def distances_after(self) -> tuple[float, ...] | None:
        """Each member's distance to the mean after; None if not measured. Copied from the device when first used."""
        return tuple(self.after.tolist()) if isinstance(self.after, Tensor) else self.after
