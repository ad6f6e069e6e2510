"""The averager: counts optimizer steps and applies a rule when it is due."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa.core import mixing
from papa.core.averager_state import AveragerState
from papa.core.averaging_report import Averaging, MergeHook
from papa.core.columns import Lines
from papa.core.diagnostics import Diagnostics
from papa.core.health import HealthCheck, NonFiniteMember, OnNonFinite, check_one_ratio
from papa.core.learning_rates import LearningRates, check_optimizers, clamped
from papa.core.measuring import Measured, measure
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.couplings.extra_rows import ExtraRows
from papa.couplings.masks import Mask
from papa.couplings.observation import observed
from papa.couplings.optimizer_state import permute_state_
from papa.errors import MixingError, PapaWarning


class Averager(AveragerState):
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
        self.population = population
        self.rule = rule
        self.num_steps = num_steps
        self.measure = measure
        self.merge_hooks: list[MergeHook] = [merge_hooks] if callable(merge_hooks) else list(merge_hooks)
        if self.merge_hooks and rule.extra_rows:
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
        self._rows = ExtraRows(population, rule.extra_rows)
        self._rates = LearningRates([optimizers] if isinstance(optimizers, Optimizer) else list(optimizers))
        check_optimizers(population, self._rates.optimizers)
        if on_nonfinite == "restart" and not rule.averages:
            on_nonfinite = "drop"
        self.health: HealthCheck | None = None
        if on_nonfinite is not None:
            self.health = HealthCheck(
                population,
                self._rates.optimizers,
                policy=on_nonfinite,
                unhealthy_reason=unhealthy_reason,
                watched=watched,
            )
        if getattr(rule, "move_momentum", False) and not self._rates.optimizers:
            raise MixingError("move_momentum needs the members' optimizers: Averager(population, rule, optimizers)")
        self._is_rounded = any(dtype.itemsize < 4 for dtype in population.matrices)
        facts = {"num_steps": str(num_steps), "measure": str(measure), "on_nonfinite": str(on_nonfinite)}
        population.group.check_same(
            {**_plain_fields(rule), **facts}, cure="give every process the same rule and options"
        )
        self._diagnostics = Diagnostics(
            population, rule, self._rates.optimizers, num_steps, watch_batches=watch_batches
        )
        population._before_soup = weakref.WeakMethod(self._diagnostics.before_soup)
        if rule.start == 0:
            self._rows.start_()

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
        self._diagnostics.on_step(uses_optimizers=lr_ratio is None)
        self._rates.update()
        if 0 < self.num_steps_taken == self.rule.start:
            if self.health is not None and self.rule.extra_rows:  # as copies of healthy members
                self.found_nonfinite = self.health.check_(self.num_steps_taken)
            self._rows.start_()
        start = time.perf_counter()
        if not self.rule.is_due(self.num_steps_taken, self.num_steps):
            return None
        if lr_ratio is None:
            lr_ratio = self._rates.ratio() if self.rule.uses_lr else 1.0
        context = AveragingContext(
            step=self.num_steps_taken,
            size=self.population.size,
            lr_ratio=clamped(lr_ratio),
            generation=self.num_averagings + 1,
            previous=self.rule.previous(self.num_steps_taken),
            state=self.rule_state,
        )
        return self._average(context, start)

    def _average(self, context: AveragingContext, start: float) -> Averaging:
        bytes_before = self.population.group.bytes_sent
        mask = self._mask(context)
        self.population.refresh_()
        chosen = self._read_chosen(mask)
        has_distances = self.measure and mask is None
        before = None
        measured: Measured | None = None
        if has_distances or (self.health is not None and chosen is None):
            watched = None if self.health is None else self.health.watched()
            measured = measure(
                self.population, distances=has_distances, health=self.health is not None, watched=watched
            )
            before = measured.distances
        found = self.found_nonfinite = (*self.found_nonfinite, *self._check(context, measured, chosen))
        if found and self.population.dropped:
            mask = self._mask(context)  # those that were just dropped take no part
        if found or self.population.dropped or self.merge_hooks:
            chosen = None  # these columns have changed, or may change
        if has_distances and (found or self.population.dropped):
            before = measure(self.population, health=False).distances
        self._diagnostics.before_averaging(before)
        known = self.rule_state
        context = self._look(context, before)
        keep = self.rule.keep(context)
        # The health check or the exchange of what the rule looked at has synchronised all processes. Since then,
        # hooks and the scoring of merges that select members may have taken longer in some of them.
        is_synchronised = not self.merge_hooks and not self.rule.is_merge
        is_refreshed = not self.merge_hooks and not self.rule.looks_at(context)
        if is_refreshed and self._is_plain_push(keep, mask):
            self.population._push_refreshed_(keep, synchronised=is_synchronised)
        else:
            matrix = self._matrix(context)
            with contextlib.ExitStack() as stack:
                for hook in self.merge_hooks:
                    stack.enter_context(hook(self.population, matrix, context))
                self._mix_(context, matrix, mask, chosen, synchronised=is_synchronised, refreshed=is_refreshed)
        self._diagnostics.after_averaging()
        self.num_averagings += 1
        after: Tensor | tuple[float, ...] | None
        if before is None or keep is None or self.merge_hooks or self._is_rounded:
            after = self.population._distances() if has_distances else None
        else:
            after = tuple(keep * distance for distance in before)  # a push contracts by exactly this factor
        num_bytes = self.population.group.bytes_sent - bytes_before
        seconds = time.perf_counter() - start
        rule, decision = type(self.rule).__name__, self._decision(known)
        return Averaging(context.step, rule, keep, before, after, found, num_bytes, seconds, decision)

    def _is_plain_push(self, keep: float | None, mask: Mask | None) -> TypeGuard[float]:
        """Whether the number that the rule keeps says all about its matrix, which then need not be made."""
        is_share = keep is not None and 0.0 <= keep <= 1.0
        return is_share and mask is None and not self.population.dropped and not self.rule.extra_rows

    def _decision(self, known: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The rule's state if this averaging changed it and it is one number or text by name, as in logs."""
        state = self.rule_state
        is_plain = not any(isinstance(value, list) for value in state.values())
        return dict(state) if is_plain and state is not known else None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The members' optimizers, as given."""
        return self._rates.optimizers

    def record_lr(self, optimizer: Optimizer) -> None:
        """Let the next step use the present learning rate of an optimizer, whatever schedules do until then."""
        self._rates.record(optimizer)

    def __repr__(self) -> str:
        total = "" if self.num_steps is None else f" of {self.num_steps}"
        steps = f"step {self.num_steps_taken}{total}, {self.num_averagings} averagings"
        return f"Averager({self.rule}, {self.population!r}, {steps})"

    def _mix_(
        self,
        context: AveragingContext,
        matrix: Tensor,
        mask: Mask | None,
        chosen: Mapping[torch.dtype, Tensor] | None,
        *,
        synchronised: bool,
        refreshed: bool,
    ) -> None:
        if mask is None and not self.rule.extra_rows:
            mix_ = self.population._mix_refreshed_ if refreshed else self.population.mix_
            mix_(matrix, synchronised=synchronised, signed=self.rule.is_signed)
            return
        own, signed = self.rule.own_matrix(context), self.rule.is_signed
        self._rows.update_(matrix, mask, own, signed=signed, synchronised=synchronised, chosen=chosen)
        if mask is not None and mask.sources is not None and getattr(self.rule, "move_momentum", False):
            permute_state_(self.population, self._rates.optimizers, mask)

    def _read_chosen(self, mask: Mask | None) -> dict[torch.dtype, Tensor] | None:
        """The columns of a mask of lines, which are few and hold no buffers; else None."""
        if mask is None or not mask.columns:
            return None
        if not all(isinstance(columns, Lines) for columns in mask.columns.values()):
            return None
        return self.population._chosen(mask.columns)

    def _mask(self, context: AveragingContext) -> Mask | None:
        population = self.population
        if population.dropped:
            mask = self.rule.mask_among(context, population._layout, population.active)
        else:
            mask = self.rule.mask(context, population._layout)
        if mask is not None:
            mask.check(population._layout, context.size)
        return mask

    def check_health(self) -> tuple[NonFiniteMember, ...]:
        """Check for non-finite members now and apply the policy; `step` does so before each averaging."""
        return () if self.health is None else self._restarted(self.health.check_(self.num_steps_taken))

    def _restarted(self, found: tuple[NonFiniteMember, ...]) -> tuple[NonFiniteMember, ...]:
        """Restart the rule's rows of members that were found non-finite."""
        if found:
            self._rows.restart_([one.member for one in found])
        return found

    def _check(
        self,
        context: AveragingContext,
        measured: Measured | None = None,
        chosen: Mapping[torch.dtype, Tensor] | None = None,
    ) -> tuple[NonFiniteMember, ...]:
        """`check_health`; and raise unless all processes are at the same learning rate."""
        if self.health is not None:
            found = self.health.check_(self.num_steps_taken, measured, lr_ratio=context.lr_ratio, chosen=chosen)
            return self._restarted(found)
        self.population.refresh_()  # before others may read these rows from shared memory
        check_one_ratio(*self.population.group.all_max(context.lr_ratio, -context.lr_ratio))
        return ()

    def _look(self, context: AveragingContext, distances: tuple[float, ...] | None = None) -> AveragingContext:
        """The context with what the rule looks at, and with its new state."""
        context = observed(self.population, self.rule, context, distances)
        if self.rule_state:  # a rule may change what it gets, and may return that
            context = replace(context, state=copy.deepcopy(dict(self.rule_state)))
        state = self.rule.next_state(context)
        if state == self.rule_state:
            return context
        self.rule_state = state
        return replace(context, state=state)

    def _matrix(self, context: AveragingContext) -> Tensor:
        active, rows = self.population.active, self.rule.extra_rows
        if len(active) == context.size:
            return self.rule.matrix(context)
        matrix = self.rule.matrix_among(context, active)
        if rows and self.rule.own_matrix(context) is None:
            return mixing.among_extended(matrix, active, context.size, [row.per_member for row in rows])
        return mixing.among(matrix, active, context.size)


def _check_kinds(population: object, rule: object) -> None:
    if not isinstance(population, Population):
        raise MixingError(f"an averager needs a papa.Population, got a {type(population).__name__}: make one first")
    if not isinstance(rule, Rule):
        found = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
        raise MixingError(f"an averager needs a rule such as papa.Push(half_life=0.003), got {found}")


def _plain_fields(rule: Rule) -> dict[str, str]:
    """The rule's fields that can be compared between processes: numbers and strings."""
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    plain = {name: str(value) for name, value in values.items() if isinstance(value, int | float | str | None)}
    return {"rule": type(rule).__name__, **plain}
