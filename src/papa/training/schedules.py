"""Learning rates as functions of the step: factors of the initial one, or the table of a PyTorch scheduler."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from papa.errors import ConfigError

Schedule: TypeAlias = Callable[[int, int], float]
"""Maps (steps taken, total number of steps) to a factor of the initial learning rate."""


def constant() -> Schedule:
    """The initial learning rate at every step."""
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
    """The half cosine of `cosine`, repeated `num_cycles` times."""
    if num_cycles < 1:
        raise ConfigError(f"num_cycles is {num_cycles}, expected at least 1")
    once = cosine(minimum)
    return lambda step, num_steps: minimum if step >= num_steps else once(step * num_cycles % num_steps, num_steps)


def multistep(milestones: Sequence[float], factor: float = 0.1) -> Schedule:
    """Multiply by `factor` at each milestone, given as a fraction of training.

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
    """Follow `schedule`, multiplied by a linear rise to 1 over the first `share` of training."""
    _check_share("share", share)

    def warmed(step: int, num_steps: int) -> float:
        num_warm_up_steps = share * num_steps
        rise = min(1.0, (step + 1) / num_warm_up_steps) if num_warm_up_steps else 1.0
        return rise * schedule(step, num_steps)

    return warmed


def then_level(before: Schedule, *, start: float, level: float, anneal: float = 0.0, linear: bool = False) -> Schedule:
    """Follow a schedule until `start`, then anneal to a constant level, as SWA does; by half a cosine, or linearly.

    `start` and `anneal` are fractions of training, `level` is the final factor of the initial learning rate.

    Example:
        >>> schedule = then_level(multistep([0.5]), start=0.5, level=0.5, anneal=0.1)
        >>> [round(schedule(step, 100), 4) for step in (49, 54, 59, 99)]
        [1.0, 0.3, 0.5, 0.5]
    """
    for name, value in (("start", start), ("anneal", anneal)):
        _check_share(name, value)
    if not level > 0.0:
        raise ConfigError(f"level is {level}, expected more than 0")

    def schedule(step: int, num_steps: int) -> float:
        first, num_annealed = round(start * num_steps), anneal * num_steps
        if step < first:
            return before(step, num_steps)
        done = min(1.0, (step - first + 1) / num_annealed) if num_annealed else 1.0
        weight = done if linear else 0.5 * (1.0 - math.cos(math.pi * done))
        return (1.0 - weight) * before(first, num_steps) + weight * level

    return schedule


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is {value}, expected a share from 0 to 1")


MakeScheduler: TypeAlias = Callable[[Optimizer, int], LRScheduler]
"""From an optimizer and the number of steps to a scheduler that is stepped after every optimizer step."""

SCHEDULED = ("lr", "momentum", "betas")
"""What schedulers change in a parameter group."""
KEPT = ("initial_lr", "max_lr", "base_momentum", "max_momentum", "min_lr")
"""What schedulers add to a parameter group."""


class LRTable:
    """What a scheduler sets at every step, recorded on a copy of an optimizer."""

    def __init__(self, make_scheduler: MakeScheduler, optimizer: Optimizer, num_steps: int) -> None:
        twin = copy.deepcopy(optimizer)
        scheduler: Any = make_scheduler(twin, num_steps)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "make_scheduler made a ReduceLROnPlateau, which waits for scores, expected a scheduler that depends on "
                "the step alone: change the learning rate in a callback instead"
            )
        if not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"make_scheduler made a {type(scheduler).__name__}, expected a scheduler of torch.optim.lr_scheduler"
            )
        self._kept = [{name: group[name] for name in KEPT if name in group} for group in twin.param_groups]
        self._rows = [self._read(twin)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the order of steps: the copy takes none
            for _ in range(num_steps):
                twin.step()  # without gradients: nothing changes
                try:
                    scheduler.step()
                except ValueError:  # a one-cycle schedule ends with its last step
                    break
                self._rows.append(self._read(twin))

    @staticmethod
    def _read(optimizer: Optimizer) -> list[dict[str, Any]]:
        return [{name: group[name] for name in SCHEDULED if name in group} for group in optimizer.param_groups]

    def set_(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rates, and momentum if it is scheduled, of the step after `step` steps."""
        row = self._rows[min(step, len(self._rows) - 1)]
        for group, kept, values in zip(optimizer.param_groups, self._kept, row, strict=True):
            group.update(kept)
            group.update(values)
