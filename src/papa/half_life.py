"""The half-life of a push, which needs no tensors: recipes compute with it before anything is trained."""

from __future__ import annotations

import math

HALF_LIFE = 0.003
"""A half-life that suits training from random weights, as a share of training; the paper's is about this."""


def half_life_in_steps(alpha: float, every_steps: int) -> float:
    """The number of steps in which a push halves the distance to the mean, if nothing else moves the members.

    Example:
        >>> round(half_life_in_steps(0.99, every_steps=10), 1)
        689.7
    """
    if alpha in (0.0, 1.0):
        return 0.0 if alpha == 0.0 else math.inf
    return every_steps * math.log(0.5) / math.log(alpha)
