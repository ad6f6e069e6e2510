"""Averaging rules: which matrix, and when.

A rule is a frozen value. It says at which steps it is due (a cadence, an optional window) and which mixing matrix it
wants there; the `Averager` applies it. Rules draw from a stream of their own, as a function of the step, so a resumed
run draws what an unbroken one would have.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from papa import mixing
from papa.errors import MixingError
from papa.streams import stream


@dataclass(frozen=True)
class AveragingContext:
    """What a rule may look at when it is due."""

    step: int
    """Optimizer steps taken so far, across epochs."""
    size: int
    """The number of members."""
    lr_ratio: float
    """The learning rate as a share of its initial value, within [0, 1]."""
    generation: int = 1
    """The how manieth averaging this is."""
    previous: int = 0
    """The step at which the rule was due the last time before; 0 if never."""

    def is_first_since(self, every_steps: int) -> bool:
        """Whether no averaging has come since the last multiple of `every_steps`: a cadence slower than the rule's."""
        return self.step // every_steps > self.previous // every_steps


@dataclass(frozen=True)
class Rule:
    """When to average, and with which matrix. Subclass it and write `matrix` for a rule of your own."""

    _: KW_ONLY
    every_steps: int = 1
    """The cadence, in optimizer steps counted across epochs."""
    start: int = 0
    """The first step at which it may be due."""
    stop: int | None = None
    """The first step at which it no longer is; None for never."""

    is_merge: ClassVar[bool] = True
    """Merges replace members, and so never fire on the last step of training."""
    is_for_any_size: ClassVar[bool] = False
    """Whether `matrix` goes by the context's size alone, so that it can be asked for fewer members."""

    @property
    def uses_lr(self) -> bool:
        """Whether its matrix depends on the learning rate."""
        return False

    def __post_init__(self) -> None:
        _check_whole("every_steps", self.every_steps, at_least=1)
        _check_whole("start", self.start, at_least=0)
        if self.stop is not None:
            _check_whole("stop", self.stop, at_least=self.start)

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """Whether to average after optimizer step `step` (the first is 1) of `num_steps` in all."""
        if step < max(self.start, 1) or (self.stop is not None and step >= self.stop):
            return False
        if self.is_merge and step == num_steps:
            return False
        return step % self.every_steps == 0

    def check_size(self, size: int) -> None:
        """Raise a `MixingError` unless the rule can average so many members."""

    def previous(self, step: int) -> int:
        """The last step before `step` at which it was due; 0 if it never was."""
        return next((earlier for earlier in range(step - 1, 0, -1) if self.is_due(earlier)), 0)

    def matrix(self, context: AveragingContext) -> Tensor:
        """The mixing matrix for this context."""
        raise TypeError(f"{type(self).__name__} has no `matrix` method: a rule must say which matrix it wants")

    def matrix_among(self, context: AveragingContext, members: Sequence[int]) -> Tensor:
        """The mixing matrix when only some of the members still take part.

        Unless the rule is for any number of members, it is what the rule's matrix says of those; a member that is told
        to become others who are gone stays itself.
        """
        if self.is_for_any_size:
            return self.matrix(replace(context, size=len(members)))
        part = self.matrix(context)[list(members)][:, list(members)]
        sums = part.sum(dim=1, keepdim=True)
        return torch.where(sums > 0, part / sums.clamp(min=1e-300), mixing.identity(len(members)))


@dataclass(frozen=True)
class Independent(Rule):
    """Never average: the baseline."""

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """Never."""
        return False

    def matrix(self, context: AveragingContext) -> Tensor:
        """The identity."""
        return mixing.identity(context.size)


HALF_LIFE_SHARE = 0.003
"""The half-life of a push that suits training from random weights, as a share of training; the paper's, too."""


@dataclass(frozen=True)
class Push(Rule):
    """PAPA: every few steps, push each member a little toward the mean.

        w_j <- a w_j + (1 - a) mean,   1 - a = (1 - alpha) lr/lr0

    Example:
        >>> Push(alpha=0.99, every_steps=10).half_life_in_steps
        689.6...
        >>> Push(half_life=500).effective_alpha
        0.986...

    How strong a push should be depends on how long training is: members that are pulled together with a half-life of
    690 steps meet many times over in 234,000 steps and never in 3,000. Give a `half_life` of `HALF_LIFE_SHARE` of
    training, whatever its length; `docs/strength.md` says where that comes from.

    Args:
        alpha: how much of itself a member keeps at each push, at the initial learning rate. The paper's 0.99 when
            neither it nor `half_life` is given.
        half_life: the same, said as the number of steps in which the distance to the mean halves if nothing else
            moves the members.
        scale_by_lr: let the push weaken with the learning rate, as the paper does.
        delay: let members train on for so many steps while their mean is made, then push by what each was off it
            (`papa.delayed`); even, and less than `every_steps`. 0 for none.
    """

    alpha: float | None = None
    half_life: float | None = None
    scale_by_lr: bool = True
    _: KW_ONLY
    every_steps: int = 10
    delay: int = 0

    is_merge: ClassVar[bool] = False
    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole("delay", self.delay, at_least=0)
        if self.delay >= self.every_steps and self.delay:
            raise MixingError(f"Push got delay={self.delay}, expected less than every_steps ({self.every_steps})")
        if self.delay % 2:
            raise MixingError(
                f"Push got delay={self.delay}, expected an even number of steps: where steps overshoot, a push that "
                "comes an odd number of steps late drives members apart"
            )
        if self.alpha is not None and self.half_life is not None:
            raise MixingError(f"Push got alpha={self.alpha} and half_life={self.half_life}: give one of the two")
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise MixingError(f"Push got alpha={self.alpha}, expected a number from 0 (merge) to 1 (never push)")
        if self.half_life is not None and not self.half_life > 0.0:
            raise MixingError(f"Push got half_life={self.half_life}, expected a positive number of steps")

    @property
    def effective_alpha(self) -> float:
        """`alpha`, whichever way the strength was given."""
        if self.half_life is not None:
            return float(0.5 ** (self.every_steps / self.half_life))
        return 0.99 if self.alpha is None else self.alpha

    @property
    def half_life_in_steps(self) -> float:
        """The half-life in steps, whichever way the strength was given."""
        alpha = self.effective_alpha
        if alpha in (0.0, 1.0):
            return 0.0 if alpha == 0.0 else math.inf
        return self.every_steps * math.log(0.5) / math.log(alpha)

    @property
    def uses_lr(self) -> bool:
        """Unless told not to."""
        return self.scale_by_lr

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """With its cadence; not where it would land after the end of training."""
        lands = num_steps is None or step + self.delay <= num_steps
        return lands and super().is_due(step, num_steps)

    def keep(self, lr_ratio: float) -> float:
        """`a`: how much of itself a member keeps when the learning rate is `lr_ratio` of its initial value."""
        strength = (1.0 - self.effective_alpha) * (lr_ratio if self.scale_by_lr else 1.0)
        return min(max(1.0 - strength, 0.0), 1.0)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`a I + (1 - a)/p`."""
        return mixing.push(context.size, self.keep(context.lr_ratio))


@dataclass(frozen=True)
class MergeAll(Rule):
    """PAPA-all: now and then, replace every member by the mean of all.

    Say when with `every_steps`, in the paper some epochs: by default it is after every step, which leaves one network.
    """

    is_for_any_size: ClassVar[bool] = True

    def matrix(self, context: AveragingContext) -> Tensor:
        """`1/p` everywhere."""
        return mixing.merge_all(context.size)


@dataclass(frozen=True)
class MergePairs(Rule):
    """PAPA-2: now and then, replace every member by the mean of two distinct members drawn uniformly.

    Say when with `every_steps`, as for `MergeAll`.

    Args:
        share: the weight of the first of the two: 1/2 in PAPA-2, 3/4 in the paper's pair-75.
        seed: where its stream starts; the pairs are a function of seed and step.
    """

    share: float = 0.5
    seed: int = 0

    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self.share)

    def matrix(self, context: AveragingContext) -> Tensor:
        """Two weights in every row."""
        generator = stream(self.seed, "merge", position=context.step)
        return mixing.merge_pairs(context.size, generator, share=self.share)


@dataclass(frozen=True)
class MergeMany(Rule):
    """Now and then, replace every member by `share` of itself and the rest of all others (many-half, many-75)."""

    share: float = 0.5

    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self.share)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`share` on the diagonal."""
        return mixing.merge_many(context.size, share=self.share)


@dataclass(frozen=True, eq=False)
class Mix(Rule):
    """Your own weighting: a fixed row-stochastic matrix, or a function that makes one for the context.

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

    def check_size(self, size: int) -> None:
        """Raise unless a fixed matrix mixes so many members."""
        if not callable(self.weights):
            mixing.check_rows(self.weights, size)

    @property
    def uses_lr(self) -> bool:
        """A function may look at it."""
        return callable(self.weights)

    def matrix(self, context: AveragingContext) -> Tensor:
        """The matrix, checked."""
        weights = self.weights(context) if callable(self.weights) else self.weights
        return mixing.check_rows(weights, context.size)


def _check_whole(name: str, value: int, *, at_least: int) -> None:
    try:
        is_good = not isinstance(value, bool) and operator.index(value) >= at_least
    except TypeError:
        is_good = False
    if not is_good:
        raise MixingError(f"{name} is {value!r}, expected a whole number of steps, at least {at_least}")


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise MixingError(f"share is {share}, expected a number from 0 to 1")
