"""How far learning rates have come down: the one number by which a push is scaled, read from the optimizers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from papa.errors import MixingError
from papa.population import Population

LOW = 0.1
MOST_LOW = 20
"""So many low ratios from the first on, and somebody should know."""


class LearningRates:
    """The learning rates of some optimizers, of the first parameter group of each.

    Args:
        optimizers: the members'; there may be none.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.highest = [0.0] * len(self.optimizers)
        """The highest rate that each was seen to have."""
        self._num_low = 0
        self._was_high = False
        """Of the ratios that were asked for, how many were low, and whether one was not."""
        self.note()

    def note(self) -> None:
        """Look at the rates as they are now."""
        for index, optimizer in enumerate(self.optimizers):
            self.highest[index] = max(self.highest[index], float(optimizer.param_groups[0]["lr"]))

    def ratio(self) -> float:
        """The rate as a share of its initial value: one number, which all members must share; 1 of no optimizers."""
        ratios = []
        for optimizer, highest in zip(self.optimizers, self.highest, strict=True):
            group = optimizer.param_groups[0]
            # One-cycle schedules start low and call the peak max_lr; all others call their base initial_lr.
            base = float(group.get("max_lr", max(group.get("initial_lr", highest), highest)))
            if base == 0.0 and any(float(other["lr"]) > 0.0 for other in optimizer.param_groups[1:]):
                warnings.warn(
                    "the first parameter group of an optimizer has a learning rate of 0 and scales pushes to nothing, "
                    "though others train: put another group first, or pass averager.step(lr_ratio=...)",
                    stacklevel=3,
                )
            ratios.append(clamped(float(group["lr"]) / base) if base > 0.0 else 0.0)
        for member, ratio in enumerate(ratios):
            if not math.isclose(ratio, ratios[0], rel_tol=1e-6, abs_tol=1e-12):
                raise MixingError(
                    f"optimizer {member} is at {ratio:.6g} of its initial learning rate, optimizer 0 at "
                    f"{ratios[0]:.6g}: a push needs one ratio for all, pass it as averager.step(lr_ratio=...)"
                )
        found = ratios[0] if ratios else 1.0
        self._warn_if_always_low(found)
        return found

    def _warn_if_always_low(self, ratio: float) -> None:
        self._was_high |= ratio >= LOW
        self._num_low += ratio < LOW
        if self._num_low == MOST_LOW and not self._was_high:
            warnings.warn(
                f"the first {MOST_LOW} pushes were scaled down to {ratio:.2g} or so, since learning rates have not yet "
                "come near their initial values: if they never will, pass averager.step(lr_ratio=...) or make the push "
                "with scale_by_lr=False",
                stacklevel=4,
            )

    def load_highest(self, highest: Iterable[float]) -> None:
        """Go on with what `highest` was."""
        found = [float(lr) for lr in highest]
        if len(found) != len(self.optimizers):
            raise MixingError(f"the state is of {len(found)} optimizers, this averager has {len(self.optimizers)}")
        self.highest = found
        self._was_high = True  # what was before is not known


def clamped(ratio: float) -> float:
    """A learning rate's share of its initial value, within [0, 1]."""
    if math.isnan(ratio):
        raise MixingError("lr_ratio is NaN, expected a number from 0 to 1")
    return min(max(ratio, 0.0), 1.0)


def check_owners(population: Population, optimizers: Sequence[Optimizer]) -> None:
    """Raise where an optimizer trains nothing of the population: its learning rate would say nothing about it."""
    ours = {id(parameter) for model in population for parameter in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if theirs and not any(id(parameter) in ours for parameter in theirs):
            raise MixingError(
                f"optimizer {number} trains no parameter of any member held here: make optimizers of the population's "
                "own members"
            )
