"""Pushes toward the mean."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.half_life import HALF_LIFE, half_life_in_steps
from papa.core.rules import AveragingContext, Rule
from papa.errors import MixingError, PapaWarning

MAX_HALF_LIFE = 0.1
"""With a longer half-life, members that start apart stay too far apart to be averaged: the longest that ever worked."""

MAX_EVERY_STEPS = 10
"""How often a push is due by default, in steps; more often if its half-life is shorter."""

MAX_ALPHA_16_BIT = 0.9
"""A weaker push on 16-bit weights moves most of them by less than half a unit in the last place: not at all."""


@dataclass(frozen=True)
class Push(Rule):
    """PAPA: every few steps, push each member a little toward the mean.

        w_j <- a w_j + (1 - a) mean,   1 - a = (1 - alpha) lr/lr0

    Example:
        >>> push = Push(half_life=0.003).for_length(3000)  # the averager does this
        >>> push.half_life_in_steps, push.every_steps
        (9.0, 9)
        >>> Push(alpha=0.99, every_steps=10).half_life_in_steps
        689.6...

    The right strength depends on the length of training. With a half-life of 690 steps, members come together many
    times over in 230,000 steps, and never in 3,000. A half-life of 0.003 (0.3%) of training is safe at any length; see
    the guide on strength. Give one of the first three:

    Args:
        half_life: the time in which the distance to the mean halves, if nothing else moves the members, as a share of
            training. The averager must know `num_steps`.
        half_life_steps: the same as a number of steps.
        alpha: the share of itself a member keeps at each push, at the highest learning rate.
        scale_by_lr: weaken the push with the learning rate, as the paper does.
        every_steps: by default every 10 steps, or once in a half-life if that is shorter.
    """

    _: KW_ONLY
    half_life: float | None = None
    half_life_steps: float | None = None
    alpha: float | None = None
    scale_by_lr: bool = True
    every_steps: int = cast(int, None)

    is_merge: ClassVar[bool] = False
    has_strength: ClassVar[bool] = True
    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_strength()
        if self._every_steps is None:
            if self.half_life is not None:
                return  # it follows from the length of training
            steps = min(MAX_EVERY_STEPS, self.half_life_steps or MAX_EVERY_STEPS)
            object.__setattr__(self, "every_steps", max(1, round(steps)))
        super().__post_init__()

    def _check_strength(self) -> None:
        strengths = {"half_life": self.half_life, "half_life_steps": self.half_life_steps, "alpha": self.alpha}
        given = {name: value for name, value in strengths.items() if value is not None}
        if len(given) != 1:
            found = " and ".join(f"{name}={value}" for name, value in given.items()) or "no strength"
            raise MixingError(
                f"Push got {found}, expected one of {', '.join(strengths)}: half_life={HALF_LIFE} is {HALF_LIFE:.1%} "
                "of training, a good start"
            )
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise MixingError(f"Push got alpha={self.alpha}, expected a number from 0 (merge) to 1 (never push)")
        if self.half_life is not None and not 0.0 < self.half_life <= 1.0:
            raise MixingError(
                f"Push got half_life={self.half_life}, expected a share of training, more than 0 and at most 1, such "
                f"as {HALF_LIFE}: give a number of steps as half_life_steps"
            )
        if self.half_life_steps is not None and not self.half_life_steps > 0.0:
            raise MixingError(f"Push got half_life_steps={self.half_life_steps}, expected a positive number of steps")

    @property
    def _every_steps(self) -> int | None:
        """`every_steps`; None while it waits for the length of training."""
        return self.every_steps

    def for_length(self, num_steps: int | None) -> Push:
        """With the half-life in steps."""
        if self.half_life is None:
            return self
        if num_steps is None:
            raise MixingError(
                f"Push(half_life={self.half_life}) is a share of training, whose length is not known: pass num_steps "
                "to the averager, or give the strength as half_life_steps or alpha"
            )
        return replace(self, half_life=None, half_life_steps=self.half_life * max(1, num_steps))

    @property
    def effective_alpha(self) -> float:
        """`alpha`, whichever way the strength was given."""
        if self.alpha is not None:
            return self.alpha
        if self.half_life_steps is None:
            return self.for_length(None).effective_alpha  # raises
        return float(0.5 ** (self.every_steps / self.half_life_steps))

    @property
    def half_life_in_steps(self) -> float:
        """The half-life in steps, whichever way the strength was given."""
        return half_life_in_steps(self.effective_alpha, self.every_steps)

    @property
    def uses_lr(self) -> bool:
        """Whether the push weakens with the learning rate."""
        return self.scale_by_lr

    def too_weak_for(self, num_steps: int) -> str | None:
        """If the half-life is a large share of training."""
        steps = self.half_life_in_steps
        if steps <= MAX_HALF_LIFE * num_steps or not 0.0 < self.effective_alpha < 1.0:
            return super().too_weak_for(num_steps)
        return f"the push has a half-life of {steps:.3g} steps, {steps / num_steps:.0%} of the training,"

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        """Warn if 16-bit weights would round the push away."""
        if self.effective_alpha > MAX_ALPHA_16_BIT and any(dtype.itemsize < 4 for dtype in dtypes):
            warnings.warn(
                f"a push that leaves members {self.effective_alpha:.3g} of themselves is lost in the rounding of "
                "bfloat16 and float16 weights: keep float32 weights and use autocast, or push more strongly and rarely",
                PapaWarning,
                stacklevel=3,
            )

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        if self._every_steps is None:
            return self.for_length(num_steps).is_due(step, num_steps)
        return super().is_due(step, num_steps)

    def keep(self, context: AveragingContext) -> float:
        """`a`: the share of itself each member keeps at this learning rate."""
        strength = (1.0 - self.effective_alpha) * (context.lr_ratio if self.scale_by_lr else 1.0)
        return min(max(1.0 - strength, 0.0), 1.0)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`a I + (1 - a)/p`."""
        return mixing.push(context.size, self.keep(context))
