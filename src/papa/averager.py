"""The averager: counts optimizer steps and applies a rule when it is due."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from papa import mixing
from papa.errors import MixingError
from papa.health import Health, Sickness
from papa.population import Population
from papa.rules import Independent, Moment, Push, Rule

Around: TypeAlias = Callable[[Population, Tensor, Moment], AbstractContextManager[None]]
"""What happens right before and right after members are mixed, given the population, the matrix and the moment."""


def chain(*arounds: Around) -> Around:
    """Several things around a mix as one: the first is the outermost, so it begins first and ends last.

    Example:
        >>> @contextlib.contextmanager
        ... def note(population, matrix, moment):
        ...     print("before", moment.step)
        ...     yield
        ...     print("after", moment.step)
        >>> from torch import nn
        >>> around = chain(note, note)
        >>> with around(Population([nn.Linear(2, 1)]), Tensor([[1.0]]), Moment(step=3, size=1, lr_ratio=1.0)):
        ...     print("mix")
        before 3
        before 3
        mix
        after 3
        after 3
    """

    @contextlib.contextmanager
    def together(population: Population, matrix: Tensor, moment: Moment) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for around in arounds:
                stack.enter_context(around(population, matrix, moment))
            yield

    return together


@dataclass(frozen=True)
class Averaging:
    """What one averaging did, for logs."""

    step: int
    """The optimizer step after which it happened, counted across epochs."""
    rule: str
    """The rule's name."""
    alpha: float | None
    """For a push, how much of itself each member kept; None for merges."""
    distances_before: tuple[float, ...] | None
    """Each member's distance to the mean before; None when not measured."""
    distances_after: tuple[float, ...] | None
    """Each member's distance to the mean after; None when not measured."""
    sick: tuple[Sickness, ...] = ()
    """Members that were found sick right before, and what was done about them."""


class Averager:
    """Applies a rule to a population when it is due.

    Call `step()` once after all members took an optimizer step and after the learning rate was updated, as in
    Algorithm 1 of the paper.

    Example:
        >>> from torch import nn, optim
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> optimizers = [optim.SGD(net.parameters(), lr=0.1) for net in population]
        >>> averager = Averager(population, Push(alpha=0.9, every_steps=2), optimizers)
        >>> averager.step()  # nothing is due after the first step
        >>> averager.step().alpha
        0.9

    Args:
        population: whose members are averaged.
        rule: which matrix, and when.
        optimizers: the members' optimizers (or one for all), read for the learning rate that scales `Push`. Without
            them, and without passing `lr_ratio` to `step`, a push is not scaled.
        num_steps: how many steps training has in all; merges then leave out the last.
        around: makes a context for each averaging from population, matrix and moment, such as
            `papa.repair.RepairMerges` or `papa.AlignMerges`; several with `papa.averager.chain`.
        measure: record distances to the mean, at the price of reading the matrix once more (twice for a merge).
        sick: what to do with a member whose numbers are not finite, before it poisons the mean: `restart` it from the
            mean of the healthy ones with fresh optimizer state, `drop` it, `stop` with an error; None not to look.
            Without averaging there is no mean to restart from: then `restart` drops.
        symptom: what else is wrong with a member held here, by its index, such as its loss; None when nothing is.
    """

    def __init__(
        self,
        population: Population,
        rule: Rule,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        num_steps: int | None = None,
        measure: bool = True,
        around: Around | None = None,
        sick: str | None = "restart",
        symptom: Callable[[int], str | None] | None = None,
    ) -> None:
        if num_steps is not None and num_steps < 0:
            raise MixingError(f"num_steps is {num_steps}, expected the number of steps of the whole training")
        self.population = population
        self.rule = rule
        self.num_steps = num_steps
        self.measure = measure
        self.around = around
        self.num_steps_taken = 0
        self.num_averagings = 0
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._highest_lrs = [0.0] * len(self._optimizers)
        if sick == "restart" and isinstance(rule, Independent):
            sick = "drop"
        self.health = None if sick is None else Health(population, self._optimizers, policy=sick, symptom=symptom)
        self._note_lrs()

    def step(self, lr_ratio: float | None = None) -> Averaging | None:
        """Count one optimizer step; average if the rule is due.

        Args:
            lr_ratio: the learning rate as a share of its initial value; None to read it from the optimizers.

        Returns:
            What happened, or None when nothing was due.
        """
        self.num_steps_taken += 1
        self._note_lrs()
        if not self.rule.is_due(self.num_steps_taken, self.num_steps):
            return None
        if lr_ratio is None:
            lr_ratio = self._lr_ratio() if self.rule.uses_lr else 1.0
        return self._average(
            Moment(
                step=self.num_steps_taken,
                size=self.population.size,
                lr_ratio=_clamped(lr_ratio),
                generation=self.num_averagings + 1,
                previous=self.rule.previous(self.num_steps_taken),
            )
        )

    def _average(self, moment: Moment) -> Averaging:
        alpha = self.rule.keep(moment.lr_ratio) if isinstance(self.rule, Push) else None
        distances = self.population.distances() if self.measure else None
        sick = self.check_health(distances)
        if distances is not None and (sick or self.population.dropped):
            distances = self.population.distances()
        before = None if distances is None else tuple(distances.tolist())
        matrix = self._matrix(moment)
        with self.around(self.population, matrix, moment) if self.around is not None else contextlib.nullcontext():
            self.population.mix_(matrix)
        self.num_averagings += 1
        if before is None or alpha is None or self.around is not None:
            after = tuple(self.population.distances().tolist()) if self.measure else None
        else:
            after = tuple(alpha * distance for distance in before)  # a push contracts by exactly alpha
        return Averaging(moment.step, type(self.rule).__name__, alpha, before, after, sick)

    def check_health(self, distances: Tensor | None = None) -> tuple[Sickness, ...]:
        """Look for sick members now and treat them; `step` does so before each averaging."""
        return () if self.health is None else self.health.check_(self.num_steps_taken, distances)

    def _matrix(self, moment: Moment) -> Tensor:
        present = self.population.present
        if len(present) == moment.size:
            return self.rule.matrix(moment)
        return mixing.among(self.rule.matrix_among(moment, present), present, moment.size)

    def _note_lrs(self) -> None:
        for index, optimizer in enumerate(self._optimizers):
            lr = float(optimizer.param_groups[0]["lr"])
            self._highest_lrs[index] = max(self._highest_lrs[index], lr)

    def _lr_ratio(self) -> float:
        """lr/lr0 of parameter group 0: one number, which all members must share."""
        ratios = []
        for optimizer, highest_lr in zip(self._optimizers, self._highest_lrs, strict=True):
            group = optimizer.param_groups[0]
            # One-cycle schedules start low and call the peak max_lr; all others call their base initial_lr.
            base = float(group.get("max_lr", group.get("initial_lr", highest_lr)))
            ratios.append(_clamped(float(group["lr"]) / base) if base > 0.0 else 0.0)
        for member, ratio in enumerate(ratios):
            if not math.isclose(ratio, ratios[0], rel_tol=1e-6, abs_tol=1e-12):
                raise MixingError(
                    f"optimizer {member} is at {ratio:.6g} of its initial learning rate, optimizer 0 at "
                    f"{ratios[0]:.6g}: a push needs one ratio for all, pass it as averager.step(lr_ratio=...)"
                )
        return ratios[0] if ratios else 1.0

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if never stopped."""
        return {
            "num_steps_taken": self.num_steps_taken,
            "num_averagings": self.num_averagings,
            "highest_lrs": list(self._highest_lrs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        lrs = [float(lr) for lr in state["highest_lrs"]]
        if len(lrs) != len(self._optimizers):
            raise MixingError(f"the state is of {len(lrs)} optimizers, this averager has {len(self._optimizers)}")
        self.num_steps_taken = int(state["num_steps_taken"])
        self.num_averagings = int(state["num_averagings"])
        self._highest_lrs = lrs


def _clamped(ratio: float) -> float:
    if math.isnan(ratio):
        raise MixingError("lr_ratio is NaN, expected a number from 0 to 1")
    return min(max(ratio, 0.0), 1.0)
