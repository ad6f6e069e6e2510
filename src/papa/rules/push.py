"""Pushes toward the mean."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from papa import mixing
from papa.errors import MixingError
from papa.rules.base import AveragingContext, Rule, check_steps

HALF_LIFE_SHARE = 0.003
"""A half-life that suits training from random weights, as a share of the number of steps; the paper's is about this."""

MAX_ALPHA_16_BIT = 0.9
"""A weaker push on 16-bit weights moves most of them by less than half a unit in the last place: not at all."""


@dataclass(frozen=True)
class Push(Rule):
    """PAPA: every few steps, push each member a little toward the mean.

        w_j <- a w_j + (1 - a) mean,   1 - a = (1 - alpha) lr/lr0

    Example:
        >>> Push(alpha=0.99, every_steps=10).half_life_in_steps
        689.6...
        >>> Push(half_life=500).effective_alpha
        0.986...

    The right strength depends on the length of training. With a half-life of 690 steps, members come together many
    times over in 230,000 steps, and never in 3,000. A half-life of `HALF_LIFE_SHARE` of the number of steps suits any
    length; see the guide on strength.

    Args:
        alpha: the share of itself a member keeps at each push, at the initial learning rate. Give this or `half_life`.
        half_life: the number of steps in which the distance to the mean halves, if nothing else moves the members.
        scale_by_lr: weaken the push with the learning rate, as the paper does.
        delay: the number of steps members train on while their mean is computed; then each is pushed by its earlier
            difference from the mean (`papa.delayed`). Even, and less than `every_steps`; 0 to push at once.
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
        check_steps("delay", self.delay, at_least=0)
        if self.delay >= self.every_steps and self.delay:
            raise MixingError(f"Push got delay={self.delay}, expected less than every_steps ({self.every_steps})")
        if self.delay % 2:
            raise MixingError(
                f"Push got delay={self.delay}, expected an even number of steps: where optimizer steps overshoot, a "
                "push that is an odd number of steps late drives members apart"
            )
        if (self.alpha is None) == (self.half_life is None):
            raise MixingError(
                f"Push got alpha={self.alpha} and half_life={self.half_life}, expected one of the two: for example "
                f"half_life={HALF_LIFE_SHARE} * num_steps, or the paper's alpha=0.99 for a training as long as its own"
            )
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise MixingError(f"Push got alpha={self.alpha}, expected a number from 0 (merge) to 1 (never push)")
        if self.half_life is not None and not self.half_life > 0.0:
            raise MixingError(f"Push got half_life={self.half_life}, expected a positive number of steps")

    @property
    def effective_alpha(self) -> float:
        """`alpha`, whichever way the strength was given."""
        if self.alpha is not None:
            return self.alpha
        assert self.half_life is not None
        return float(0.5 ** (self.every_steps / self.half_life))

    @property
    def half_life_in_steps(self) -> float:
        """The half-life in steps, whichever way the strength was given."""
        alpha = self.effective_alpha
        if alpha in (0.0, 1.0):
            return 0.0 if alpha == 0.0 else math.inf
        return self.every_steps * math.log(0.5) / math.log(alpha)

    @property
    def uses_lr(self) -> bool:
        """Whether the push weakens with the learning rate."""
        return self.scale_by_lr

    @property
    def num_delay_steps(self) -> int:
        """`delay`."""
        return self.delay

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        """Warn if 16-bit weights would round the push away."""
        if self.effective_alpha > MAX_ALPHA_16_BIT and any(dtype.itemsize < 4 for dtype in dtypes):
            warnings.warn(
                f"a push that leaves members {self.effective_alpha:.3g} of themselves is lost in the rounding of "
                "bfloat16 and float16 weights: keep float32 weights and use autocast, or push more strongly and rarely",
                stacklevel=3,
            )

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """With its cadence, unless a delayed push would take effect after the end of training."""
        is_in_time = num_steps is None or step + self.delay <= num_steps
        return is_in_time and super().is_due(step, num_steps)

    def keep(self, context: AveragingContext) -> float:
        """`a`: the share of itself each member keeps at this learning rate."""
        strength = (1.0 - self.effective_alpha) * (context.lr_ratio if self.scale_by_lr else 1.0)
        return min(max(1.0 - strength, 0.0), 1.0)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`a I + (1 - a)/p`."""
        return mixing.push(context.size, self.keep(context))
