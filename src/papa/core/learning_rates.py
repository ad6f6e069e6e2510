"""The ratio of the current to the highest learning rate, read from the optimizers: it scales pushes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from papa.core.population import Population
from papa.errors import MixingError, PapaWarning

LOW_RATIO = 0.1
NUM_LOW_BEFORE_WARNING = 20
"""After this many pushes with a low ratio, and none with a higher one, the user is warned."""


class LearningRates:
    """The learning rates of the members' optimizers, if there are any; of each, that of the first parameter group."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.highest = [0.0] * len(self.optimizers)
        """The highest learning rate seen, by optimizer."""
        self._recorded: dict[int, float] = {}
        """Ratios at the time of a step, by the index of the optimizer."""
        self._num_low = 0
        self._was_high = False
        self._previous = math.inf
        self.update()

    def update(self) -> None:
        """Read the current learning rates."""
        for index, optimizer in enumerate(self.optimizers):
            self.highest[index] = max(self.highest[index], float(optimizer.param_groups[0]["lr"]))

    def ratio(self) -> float:
        """The learning rate divided by its highest value, which all members must share; 1 without optimizers."""
        recorded, self._recorded = self._recorded, {}
        known: dict[Any, float] = {}
        ratios = []
        for index, (optimizer, highest) in enumerate(zip(self.optimizers, self.highest, strict=True)):
            group = optimizer.param_groups[0]
            rates = (recorded.get(index), group["lr"], group.get("initial_lr"), group.get("max_lr"), highest)
            ratio = known.get(rates)  # most often all members have the same learning rates
            if not ratio:  # 0 may be a reason to warn
                ratio = known[rates] = recorded[index] if index in recorded else self._ratio_of(index)
            ratios.append(ratio)
        for member, ratio in enumerate(ratios) if len(known) > 1 else ():
            if not math.isclose(ratio, ratios[0], rel_tol=1e-6, abs_tol=1e-12):
                raise MixingError(
                    f"optimizer {member} is at {ratio:.6g} of its highest learning rate, optimizer 0 at "
                    f"{ratios[0]:.6g}: a push needs one ratio for all, pass it as averager.step(lr_ratio=...)"
                )
        ratio = ratios[0] if ratios else 1.0
        self._warn_if_always_low(ratio)
        return ratio

    def record(self, optimizer: Optimizer) -> None:
        """Let the next `ratio` use the present learning rate of an optimizer, whatever schedules do until then."""
        self.update()
        index = next(index for index, one in enumerate(self.optimizers) if one is optimizer)
        self._recorded[index] = self._ratio_of(index)

    def _ratio_of(self, index: int) -> float:
        optimizer, highest = self.optimizers[index], self.highest[index]
        group = optimizer.param_groups[0]
        # One-cycle schedules start low and store the peak as max_lr; all others store the base as initial_lr.
        base = float(group.get("max_lr", max(group.get("initial_lr", highest), highest)))
        if base == 0.0 and any(float(other["lr"]) > 0.0 for other in optimizer.param_groups[1:]):
            warnings.warn(
                "the first parameter group of an optimizer has a learning rate of 0, which scales pushes to nothing, "
                "although other groups train: put another group first, or pass averager.step(lr_ratio=...)",
                PapaWarning,
                stacklevel=4,
            )
        return clamped(float(group["lr"]) / base) if base > 0.0 else 0.0

    def _warn_if_always_low(self, ratio: float) -> None:
        self._was_high |= ratio >= LOW_RATIO
        self._num_low += ratio < LOW_RATIO and ratio <= self._previous  # a warm-up rises
        self._previous = ratio
        if self._num_low == NUM_LOW_BEFORE_WARNING and not self._was_high:
            warnings.warn(
                f"{NUM_LOW_BEFORE_WARNING} pushes were scaled down to about {ratio:.2g}, since learning rates have not "
                "come near their highest values yet: if they never will, pass "
                "averager.step(lr_ratio=...) or make the push with scale_by_lr=False",
                PapaWarning,
                stacklevel=4,
            )

    def load_highest(self, highest: Iterable[float]) -> None:
        """Restore `highest` from a checkpoint."""
        found = [float(lr) for lr in highest]
        if len(found) != len(self.optimizers):
            raise MixingError(f"the state is of {len(found)} optimizers, this averager has {len(self.optimizers)}")
        self.highest = found
        self._was_high = True  # earlier ratios are not known


def clamped(ratio: float) -> float:
    """A learning rate ratio, limited to [0, 1]."""
    if math.isnan(ratio):
        raise MixingError("lr_ratio is NaN, expected a number from 0 to 1")
    return min(max(ratio, 0.0), 1.0)


def check_optimizers(population: Population, optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer trains no parameter of the population."""
    ours = {id(parameter) for model in population for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if theirs and not any(id(parameter) in ours for parameter in theirs):
            raise MixingError(
                f"optimizer {index} trains no parameter of any local member: create optimizers from the population's "
                "own members"
            )
