"""Learning rates of a PyTorch scheduler as a table over steps, so that they are a function of the step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from papa.errors import ConfigError

MakeScheduler = Callable[[Optimizer, int], LRScheduler]
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
