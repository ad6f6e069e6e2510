"""The averager: counts optimizer steps and applies a rule when it is due."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa.core.diagnostics import Diagnostics
from papa.core.health import HealthCheck, NonFiniteMember, OnNonFinite
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.errors import MixingError, PapaWarning

LOW_RATIO = 0.1
NUM_LOW_BEFORE_WARNING = 20
"""After this many pushes with a low ratio, and none with a higher one, the user is warned."""


class LearningRates:
    """The learning rates of the members' optimizers, if there are any; of each, that of the first parameter group."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.highest: list[float | Tensor] = [0.0] * len(self.optimizers)
        """The highest learning rate seen, by optimizer."""
        self._recorded: dict[int, float] = {}
        """Ratios at the time of a step, by the index of the optimizer."""
        self._num_low = 0
        self._was_high = False
        self._previous = math.inf
        self.update()

    def update(self) -> None:
        """Look at the current learning rates; those that are tensors are not read from their device."""
        for index, optimizer in enumerate(self.optimizers):
            lr, highest = optimizer.param_groups[0]["lr"], self.highest[index]
            self.highest[index] = lr.detach().clamp(min=highest) if isinstance(lr, Tensor) else max(highest, float(lr))

    def ratio(self) -> float:
        """The learning rate divided by its highest value, which all members must share; 1 without optimizers."""
        found, self._recorded = self._recorded, {}
        found |= self._ratios([index for index in range(len(self.optimizers)) if index not in found])
        ratios = [found[index] for index in range(len(self.optimizers))]
        for member, ratio in enumerate(ratios):
            if not math.isclose(ratio, ratios[0], rel_tol=1e-6, abs_tol=1e-12):
                raise MixingError(
                    f"optimizer {member} is at {ratio:.6g} of its highest learning rate, optimizer 0 at "
                    f"{ratios[0]:.6g}: a push needs one ratio for all, pass it as averager.step(lr_ratio=...)"
                )
        ratio = ratios[0] if ratios else 1.0
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
        return ratio

    def record(self, optimizer: Optimizer) -> None:
        """Let the next `ratio` use the present learning rate of an optimizer, whatever schedules do until then."""
        self.update()
        self._recorded |= self._ratios([index for index, one in enumerate(self.optimizers) if one is optimizer])

    def _ratios(self, indices: Sequence[int]) -> dict[int, float]:
        """The current ratio of each of these optimizers; one read if learning rates are tensors."""
        found: list[Any] = []
        for index in indices:
            group, highest = self.optimizers[index].param_groups[0], self.highest[index]
            found += [group["lr"], group.get("max_lr"), group.get("initial_lr"), highest]
        tensors = [value.detach().reshape(()).double() for value in found if isinstance(value, Tensor)]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
        values = [next(numbers) if isinstance(value, Tensor) else value for value in found]
        ratios = {}
        for n, index in enumerate(indices):
            lr, max_lr, initial_lr, highest = values[4 * n : 4 * n + 4]
            # One-cycle schedules start low and store the peak as max_lr; all others store the base as initial_lr.
            base = float(max(highest, highest if initial_lr is None else initial_lr) if max_lr is None else max_lr)
            ratios[index] = clamped(float(lr) / base) if base > 0.0 else 0.0
            others = self.optimizers[index].param_groups[1:]
            if base == 0.0 and any(float(other["lr"]) > 0.0 for other in others):
                warnings.warn(
                    "the first parameter group of an optimizer has a learning rate of 0, which scales pushes to "
                    "nothing, although other groups train: put another group first, or pass "
                    "averager.step(lr_ratio=...)",
                    PapaWarning,
                    stacklevel=4,
                )
        return ratios

    def load_highest(self, highest: Iterable[float]) -> None:
        """Restore `highest` from a checkpoint."""
        found = [float(lr) for lr in highest]
        if len(found) != len(self.optimizers):
            raise MixingError(f"the state is of {len(found)} optimizers, this averager has {len(self.optimizers)}")
        self.highest = list(found)
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


MergeHook: TypeAlias = Callable[[Population, Tensor, AveragingContext], AbstractContextManager[None]]
"""Code to run right before and right after members are mixed: a function that returns a context manager.

It is given the population, the mixing matrix and the context of the averaging."""


@dataclass(frozen=True)
class Averaging:
    """What one averaging did, for logs."""

    step: int
    """The optimizer step after which it happened, counted across epochs."""
    rule: str
    """The rule's name."""
    alpha: float | None
    """For a push toward the mean, the share of itself each member kept; None for other rules."""
    distances_before: tuple[float, ...] | None
    """Each member's distance to the mean before; None if not measured."""
    after: Tensor | tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    """What `distances_after` reads."""
    nonfinite: tuple[NonFiniteMember, ...] = ()
    """Members that were found non-finite right before, and what was done."""
    bytes: int = field(default=0, compare=False)
    """The number of bytes this process sent to others."""
    seconds: float = field(default=0.0, compare=False)
    """How long training waited for it in this process."""
    decision: Mapping[str, Any] | None = None
    """What a rule that decides by what it sees remembers from now on, such as its new strength; None if unchanged."""

    @functools.cached_property
    def distances_after(self) -> tuple[float, ...] | None:
        """Each member's distance to the mean after; None if not measured. Copied from the device when first used."""
        return tuple(self.after.tolist()) if isinstance(self.after, Tensor) else self.after


class Averager:
    """Applies a rule to a population when it is due.

    Call `step()` once after all members took an optimizer step and after the learning rate was updated (Algorithm 1 of
    the paper).

    Example:
        >>> from torch import nn, optim
        >>> from papa import Push
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> optimizers = [optim.SGD(net.parameters(), lr=0.1) for net in population]
        >>> averager = Averager(population, Push(alpha=0.9, every_steps=2), optimizers)
        >>> averager.step()  # nothing is due after the first step
        >>> averager.step().alpha
        0.9

    Args:
        population: the members to average.
        rule: when to average, and with which matrix.
        optimizers: the members' optimizers (or one for all). The learning rate of the first parameter group scales
            `Push`. Without them, and without `lr_ratio` in `step`, a push is not scaled.
        num_steps: the number of optimizer steps of the whole training, per member. A rule with a share of training
            needs it, and merges then skip the last step.
        measure: record distances to the mean, which reads the matrix once more (twice for a merge).
        merge_hooks: one or several hooks that run around each averaging, such as `papa.RepairMerges` or
            `papa.AlignMerges`. The first is the outermost: it begins first and ends last.
        on_nonfinite: what to do with a member whose weights are not finite, before it reaches the mean: `restart` it
            from the mean of the healthy members with fresh optimizer state, `drop` it, or `stop` with an error; None
            to skip the check. Without averaging there is no mean to restart from: then `restart` drops.
        unhealthy_reason: an additional check of a local member, by index; returns what is wrong with it, or None.
        watched: a function that returns a number for each local member, such as its loss. It is read together with
            what the averager measures, and `unhealthy_reason` is called only if it is not finite.
        watch_batches: warn if all members see the same first batches, by hooks on their forward passes.
    """

    def __init__(
        self,
        population: Population,
        rule: Rule,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        num_steps: int | None = None,
        measure: bool = True,
        merge_hooks: MergeHook | Sequence[MergeHook] = (),
        on_nonfinite: OnNonFinite | None = "restart",
        unhealthy_reason: Callable[[int], str | None] | None = None,
        watched: Callable[[], Tensor] | None = None,
        watch_batches: bool = True,
    ) -> None:
        _check_kinds(population, rule)
        if num_steps is not None and num_steps < 0:
            raise MixingError(f"num_steps is {num_steps}, expected the number of steps of the whole training")
        rule = rule.for_length(num_steps)
        rule.check(population.size, population.matrices)
        self.population, self.rule, self.num_steps, self.measure = population, rule, num_steps, measure
        self.merge_hooks: list[MergeHook] = [merge_hooks] if callable(merge_hooks) else list(merge_hooks)
        if self.merge_hooks and not rule.takes_hooks:
            raise MixingError(
                f"{type(rule).__name__} has rows of its own and cannot have merge hooks, which change members only: "
                "remove the hooks, such as alignment"
            )
        self.num_steps_taken = 0
        self.num_averagings = 0
        self.rule_state: Mapping[str, Any] = rule.initial_state(population.size)
        """What the rule remembers; see `Rule.next_state`."""
        self.found_nonfinite: tuple[NonFiniteMember, ...] = ()
        """Members that the last step found non-finite."""
        self.memory = rule.memory(population)
        """The tensors that the rule keeps."""
        self._rates = LearningRates([optimizers] if isinstance(optimizers, Optimizer) else list(optimizers))
        check_optimizers(population, self.optimizers)
        if on_nonfinite == "restart" and not rule.averages:
            on_nonfinite = "drop"
        self.health = HealthCheck(
            population,
            self.memory,
            self.optimizers,
            policy=on_nonfinite,
            unhealthy_reason=unhealthy_reason,
            watched=watched,
        )
        self._is_rounded = any(dtype.itemsize < 4 for dtype in population.matrices)
        values = {entry.name: getattr(rule, entry.name) for entry in fields(rule)}
        facts = {name: str(value) for name, value in values.items() if isinstance(value, int | float | str | None)}
        facts |= {"num_steps": str(num_steps), "measure": str(measure), "on_nonfinite": str(on_nonfinite)}
        population.group.check_same(
            {"rule": type(rule).__name__, **facts}, cure="give every process the same rule and options"
        )
        self.diagnostics = Diagnostics(population, rule, self.optimizers, num_steps, watch_batches=watch_batches)
        population.before_soup = weakref.WeakMethod(self.diagnostics.before_soup)
        if rule.start == 0:
            self.memory.start_()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The members' optimizers, as given."""
        return self._rates.optimizers

    def step(self, lr_ratio: float | None = None) -> Averaging | None:
        """Count one optimizer step, and average if the rule is due.

        Args:
            lr_ratio: the learning rate divided by its initial value; None to read it from the optimizers.

        Returns:
            What happened, or None if nothing happened.
        """
        self.num_steps_taken += 1
        if self.num_steps is not None and self.num_steps_taken == self.num_steps + 1:
            warnings.warn(
                f"training goes on after num_steps = {self.num_steps}: the half-life was set for that length, and "
                "merges skipped that step as the last. Pass the real number of steps",
                PapaWarning,
                stacklevel=2,
            )
        self.found_nonfinite = ()
        self.diagnostics.on_step(uses_optimizers=lr_ratio is None)
        self._rates.update()
        if 0 < self.num_steps_taken == self.rule.start:
            self.found_nonfinite = self.check_health()  # what the rule keeps begins as a copy of healthy members
            self.memory.start_()
        if not self.rule.is_due(self.num_steps_taken, self.num_steps):
            return None
        if lr_ratio is None:
            lr_ratio = self._rates.ratio() if self.rule.uses_lr else 1.0
        start, population = time.perf_counter(), self.population
        bytes_before = population.group.bytes_sent
        context = AveragingContext(
            step=self.num_steps_taken,
            size=population.size,
            lr_ratio=clamped(lr_ratio),
            generation=self.num_averagings + 1,
            previous=self.rule.previous(self.num_steps_taken),
            state=self.rule_state,
            memory=self.memory,
            is_fresh=not self.merge_hooks and not self.rule.is_merge,
        )
        population.refresh_()
        context = self.rule.prepare(population, context)
        has_distances = self.measure and context.columns is None  # else only few columns are read
        measured = self.health.measure(context.columns, distances=has_distances)
        self.found_nonfinite += self.health.check_(context.step, measured, context.lr_ratio)
        distances = measured.distances
        if self.found_nonfinite or population.dropped:  # these members have changed since
            context = self.rule.prepare(population, context)
            distances = tuple(population.distances().tolist()) if has_distances else None
        self.diagnostics.before_averaging(distances)
        context = replace(context, distances=distances)
        seen = self.rule.see(population, context)
        context, decision = (seen if seen is context else replace(seen, is_fresh=False)), None
        if self.rule_state:
            context, decision = self._next_state(context)
        if self.merge_hooks:
            context = replace(context, matrix=self.rule.whole_matrix(context, population.active))
        with contextlib.ExitStack() as stack:
            for hook in self.merge_hooks:
                assert context.matrix is not None
                stack.enter_context(hook(population, context.matrix, context))
            keep = self.rule.apply_(population, context)
        self.diagnostics.after_averaging()
        self.num_averagings += 1
        after: Tensor | tuple[float, ...] | None
        if distances is None or keep is None or self.merge_hooks or self._is_rounded:
            after = population.measure_distances() if has_distances else None
        else:
            after = tuple(keep * distance for distance in distances)  # a push contracts by exactly this factor
        return Averaging(
            context.step,
            type(self.rule).__name__,
            keep,
            distances,
            after,
            self.found_nonfinite,
            population.group.bytes_sent - bytes_before,
            time.perf_counter() - start,
            decision,
        )

    def _next_state(self, context: AveragingContext) -> tuple[AveragingContext, Mapping[str, Any] | None]:
        """The context with the rule's new state; and this state for logs, if it changed."""
        # A rule may change the state that it gets, and may return that.
        context = replace(context, state=copy.deepcopy(dict(self.rule_state)))
        state = self.rule.next_state(context)
        is_new, self.rule_state = state != self.rule_state, state
        is_plain = not any(isinstance(value, list) for value in state.values())
        return replace(context, state=state), dict(state) if is_new and is_plain else None

    def check_health(self) -> tuple[NonFiniteMember, ...]:
        """Check for non-finite members now and apply the policy; `step` does so before each averaging."""
        self.population.refresh_()
        return self.health.check_(self.num_steps_taken, self.health.measure(distances=False))

    def record_lr(self, optimizer: Optimizer) -> None:
        """Let the next step use the present learning rate of an optimizer, whatever schedules do until then."""
        self._rates.record(optimizer)

    def __repr__(self) -> str:
        total = "" if self.num_steps is None else f" of {self.num_steps}"
        steps = f"step {self.num_steps_taken}{total}, {self.num_averagings} averagings"
        return f"Averager({self.rule}, {self.population!r}, {steps})"

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to continue exactly."""
        state: dict[str, Any] = {
            "num_steps_taken": self.num_steps_taken,
            "num_averagings": self.num_averagings,
            "highest_lrs": [float(lr) for lr in self._rates.highest],
        }
        if self.rule_state:
            state["rule"] = dict(self.rule_state)
        tensors = [self.memory.tensors_of(index) for index in range(len(self.population))]
        if any(tensors):
            state["tensors"] = tensors
        if self.population.dropped:
            state["dropped"] = sorted(self.population.dropped)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        missing = {"num_steps_taken", "num_averagings", "highest_lrs"} - set(state)
        if missing:
            raise MixingError(f"the state has no {', '.join(sorted(missing))}: it is not the state of an averager")
        dropped = frozenset(state.get("dropped", ()))
        if not dropped <= set(range(self.population.size)):
            raise MixingError(
                f"the state dropped members {sorted(dropped)}, this population has {self.population.size}"
            )
        rule_state = self.checked_rule_state(state.get("rule"))
        self._rates.load_highest(state["highest_lrs"])
        self.rule_state = rule_state
        self.num_steps_taken = int(state["num_steps_taken"])
        self.num_averagings = int(state["num_averagings"])
        self.population.dropped = dropped
        self.memory.load_(state.get("tensors", [{}] * len(self.population)))

    def checked_rule_state(self, state: Any) -> Mapping[str, Any]:
        """A saved state of the rule, or a `MixingError`; the initial state for None."""
        initial = self.rule.initial_state(self.population.size)
        if state is None:
            return initial
        if not isinstance(state, Mapping) or state.keys() != initial.keys():
            expected = ", ".join(initial) or "nothing"
            raise MixingError(f"the state of {type(self.rule).__name__} is {state!r}, expected {expected}")
        return dict(state)


def _check_kinds(population: object, rule: object) -> None:
    if not isinstance(population, Population):
        raise MixingError(f"an averager needs a papa.Population, got a {type(population).__name__}: make one first")
    if not isinstance(rule, Rule):
        found = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
        raise MixingError(f"an averager needs a rule such as papa.Push(half_life=0.003), got {found}")
