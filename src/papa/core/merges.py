"""Merges, which replace members, and the rule that never averages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.rules import AveragingContext, Rule
from papa.streams import stream


@dataclass(frozen=True)
class Independent(Rule):
    """Never average: the baseline."""

    _: KW_ONLY
    every_steps: int = 1

    averages: ClassVar[bool] = False
    is_merge: ClassVar[bool] = False

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """Never."""
        return False

    def matrix(self, context: AveragingContext) -> Tensor:
        """The identity."""
        return mixing.identity(context.size)


@dataclass(frozen=True)
class MergeAll(Rule):
    """PAPA-all: every few epochs, replace every member by the mean of all.

    Example:
        >>> rule = MergeAll(every_steps=1000)
    """

    is_for_any_size: ClassVar[bool] = True

    def matrix(self, context: AveragingContext) -> Tensor:
        """`1/p` everywhere."""
        return mixing.merge_all(context.size)


@dataclass(frozen=True)
class MergePairs(Rule):
    """PAPA-2: every few epochs, replace every member by the mean of two distinct members drawn uniformly.

    Args:
        share: the weight of the first of the two: 1/2 in PAPA-2, 3/4 in the paper's pair-75.
        seed: the seed of the pairs, which are a function of seed and step.
    """

    share: float = 0.5
    seed: int = 0

    is_for_any_size: ClassVar[bool] = True
    shares = ("share",)

    def matrix(self, context: AveragingContext) -> Tensor:
        """Two weights in every row."""
        generator = stream(self.seed, "merge", position=context.step)
        return mixing.merge_pairs(context.size, generator, share=self.share)


@dataclass(frozen=True)
class MergeMany(Rule):
    """Every few epochs, each member keeps `share` of itself and takes the rest from all others (many-half, many-75)."""

    share: float = 0.5

    is_for_any_size: ClassVar[bool] = True
    shares = ("share",)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`share` on the diagonal."""
        return mixing.merge_many(context.size, share=self.share)


@dataclass(frozen=True, eq=False)
class Mix(Rule):
    """Your own weights: a fixed matrix whose rows sum to 1, or a function that returns one.

    Example:
        >>> ring = Mix([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]], every_steps=100)

    Args:
        weights: anything `torch.as_tensor` takes, or a function from `AveragingContext` to that.
    """

    weights: Any | Callable[[AveragingContext], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.weights):
            mixing.check_rows(self.weights)

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        """Raise unless a fixed matrix fits the number of members."""
        if not callable(self.weights):
            mixing.check_rows(self.weights, size)

    @property
    def uses_lr(self) -> bool:
        """A function may use the learning rate."""
        return callable(self.weights)

    def matrix(self, context: AveragingContext) -> Tensor:
        """The matrix, checked."""
        weights = self.weights(context) if callable(self.weights) else self.weights
        return mixing.check_rows(weights, context.size)
