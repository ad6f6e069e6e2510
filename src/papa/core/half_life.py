"""The half-life of a push, which needs no tensors: recipes compute with it before anything is trained."""

from __future__ import annotations

import math

HALF_LIFE = 0.003
"""A half-life that suits training from random weights, as a share of training; the paper's is about this."""
SHORT_HALF_LIFE = 0.01
"""The best single share in trainings of 500 to 8,000 steps (`docs/strength.md`)."""
LONGEST_SHORT = 10_000
"""The number of steps up to which `SHORT_HALF_LIFE` is known to keep members together."""


def default_half_life(num_steps: int) -> float:
    """A half-life as a share of training: 1% of up to 10,000 steps, 0.3% of more.

    Example:
        >>> default_half_life(2_000), default_half_life(229_500)
        (0.01, 0.003)
    """
    return SHORT_HALF_LIFE if num_steps <= LONGEST_SHORT else HALF_LIFE


def half_life_in_steps(alpha: float, every_steps: int) -> float:
    """The number of steps in which a push halves the distance to the mean, if nothing else moves the members.

    Example:
        >>> round(half_life_in_steps(0.99, every_steps=10), 1)
        689.7
    """
    if alpha in (0.0, 1.0):
        return 0.0 if alpha == 0.0 else math.inf
    return every_steps * math.log(0.5) / math.log(alpha)
