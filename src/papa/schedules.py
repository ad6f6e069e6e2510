"""Learning rates as pure functions of the step: a share of the initial rate, within [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from papa.errors import ConfigError

Schedule: TypeAlias = Callable[[int, int], float]
"""From the steps taken and the steps in all to the share of the initial learning rate."""


def constant() -> Schedule:
    """The initial learning rate throughout."""
    return lambda step, num_steps: 1.0


def cosine(minimum: float = 0.0) -> Schedule:
    """Half a cosine from 1 to `minimum`.

    Example:
        >>> schedule = cosine(minimum=0.001)
        >>> schedule(0, 100), round(schedule(50, 100), 4), schedule(100, 100)
        (1.0, 0.5005, 0.001)
    """
    _check_share("minimum", minimum)
    return lambda step, num_steps: minimum + (1.0 - minimum) * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


def cosine_restarts(num_cycles: int, minimum: float = 0.0) -> Schedule:
    """The same half cosine `num_cycles` times over."""
    _check_share("minimum", minimum)
    if num_cycles < 1:
        raise ConfigError(f"num_cycles is {num_cycles}, expected at least 1")
    once = cosine(minimum)

    def schedule(step: int, num_steps: int) -> float:
        if step >= num_steps:
            return minimum
        return once(step * num_cycles % num_steps, num_steps)

    return schedule


def multistep(milestones: Sequence[float], factor: float = 0.1) -> Schedule:
    """Multiplied by `factor` at each milestone, given as shares of training.

    Example:
        >>> schedule = multistep([0.5, 0.75])
        >>> [round(schedule(step, 100), 4) for step in (49, 50, 75)]
        [1.0, 0.1, 0.01]
    """
    for milestone in milestones:
        _check_share("milestone", milestone)
    return lambda step, num_steps: float(
        factor ** sum(step >= round(milestone * num_steps) for milestone in milestones)
    )


def warm_up(schedule: Schedule, share: float) -> Schedule:
    """Rise linearly over the first `share` of training, then follow `schedule`."""
    _check_share("share", share)

    def warmed(step: int, num_steps: int) -> float:
        num_warm_up_steps = share * num_steps
        rise = min(1.0, (step + 1) / num_warm_up_steps) if num_warm_up_steps else 1.0
        return rise * schedule(step, num_steps)

    return warmed


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is {value}, expected a share from 0 to 1")
