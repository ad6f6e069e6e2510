"""The averager: counts optimizer steps and applies a rule when it is due."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa import mixing
from papa.delayed import DelayedPush, dtype_name
from papa.diagnostics import Diagnostics
from papa.errors import MixingError, PapaWarning
from papa.extra_rows import DelayedStep, ExtraRows
from papa.health import HealthCheck, NonFiniteMember, OnNonFinite, check_one_ratio
from papa.learning_rates import LearningRates, check_optimizers, clamped
from papa.masks import Mask
from papa.observation import observed
from papa.optimizer_state import permute_state_
from papa.population import Population
from papa.rules import AveragingContext, Rule

MergeHook: TypeAlias = Callable[[Population, Tensor, AveragingContext], AbstractContextManager[None]]
"""Code to run right before and right after members are mixed: a function that returns a context manager.

It is given the population, the mixing matrix and the context of the averaging."""

PendingState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""The unfinished averaging of one member: named tensors, and numbers."""


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
    distances_after: tuple[float, ...] | None
    """Each member's distance to the mean after; None if not measured."""
    nonfinite: tuple[NonFiniteMember, ...] = ()
    """Members that were found non-finite right before, and what was done."""
    bytes: int = field(default=0, compare=False)
    """The number of bytes this process sent to others."""
    seconds: float = field(default=0.0, compare=False)
    """How long training waited for it in this process."""
    decision: Mapping[str, Any] | None = None
    """What a rule that decides by what it sees remembers from now on, such as its new strength; None if unchanged."""


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
        if self.merge_hooks and rule.num_delay_steps:
            raise MixingError(
                f"{type(rule).__name__} has a delay and cannot have merge hooks, since members train on meanwhile: set "
                "delay=0 or remove the hooks"
            )
        self.num_steps_taken = 0
        self.num_averagings = 0
        self.rule_state: Mapping[str, Any] = rule.initial_state(population.size)
        """What the rule remembers; see `Rule.next_state`."""
        self.found_nonfinite: tuple[NonFiniteMember, ...] = ()
        """Members that the last step found non-finite. A delayed push reports them again when it is applied."""
        self._rows = ExtraRows(population, rule.extra_rows)
        self._pending: DelayedPush | DelayedStep | None = None
        self._seconds_to_start = 0.0
        self._nonfinite_at_start: tuple[NonFiniteMember, ...] = ()
        self._rates = LearningRates([optimizers] if isinstance(optimizers, Optimizer) else list(optimizers))
        check_optimizers(population, self._rates.optimizers)
        if on_nonfinite == "restart" and not rule.averages:
            on_nonfinite = "drop"
        self.health: HealthCheck | None = None
        if on_nonfinite is not None:
            self.health = HealthCheck(
                population, self._rates.optimizers, policy=on_nonfinite, unhealthy_reason=unhealthy_reason
            )
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
            What happened, or None if nothing happened; a delayed push is reported when it takes effect.
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
            self._rows.start_()
        start = time.perf_counter()
        applied = self._apply_pending(start)
        if not self.rule.is_due(self.num_steps_taken, self.num_steps):
            return applied
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
        if self.rule.num_delay_steps:
            self._start_delayed(context, start)
            return None
        return self._average(context, start)

    def _average(self, context: AveragingContext, start: float) -> Averaging:
        bytes_before = self.population.group.bytes_sent
        mask = self._mask(context)
        measure = self.measure and mask is None
        distances = self.population.distances() if measure else None
        chosen = self._read_chosen(mask)
        found = self.found_nonfinite = self._check(context, distances, chosen)
        if found or self.population.dropped or self.merge_hooks:
            chosen = None  # these columns have changed, or may change
        if distances is not None and (found or self.population.dropped):
            distances = self.population.distances()
        self._diagnostics.before_averaging(distances)
        before = None if distances is None else tuple(distances.tolist())
        known = self.rule_state
        context = self._look(context, distances)
        keep = self.rule.keep(context)
        matrix = self._matrix(context)
        with contextlib.ExitStack() as stack:
            for hook in self.merge_hooks:
                stack.enter_context(hook(self.population, matrix, context))
            # The health check or the exchange of what the rule looked at has synchronised all processes. Since then,
            # hooks and the scoring of merges that select members may have taken longer in some of them.
            is_synchronised = not self.merge_hooks and not self.rule.is_merge
            self._mix_(context, matrix, mask, chosen, synchronised=is_synchronised)
        self._diagnostics.after_averaging()
        self.num_averagings += 1
        if before is None or keep is None or self.merge_hooks or self._is_rounded:
            after = tuple(self.population.distances().tolist()) if measure else None
        else:
            after = tuple(keep * distance for distance in before)  # a push contracts by exactly this factor
        num_bytes = self.population.group.bytes_sent - bytes_before
        seconds = time.perf_counter() - start
        rule, decision = type(self.rule).__name__, self._decision(known)
        return Averaging(context.step, rule, keep, before, after, found, num_bytes, seconds, decision)

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
    ) -> None:
        if mask is None and not self.rule.extra_rows:
            self.population.mix_(matrix, synchronised=synchronised, signed=self.rule.is_signed)
            return
        self._rows.update_(matrix, mask, self.rule.own_matrix(context), synchronised=synchronised, chosen=chosen)
        if mask is not None and mask.sources is not None and getattr(self.rule, "move_momentum", False):
            permute_state_(self.population, self._rates.optimizers, mask)

    def _read_chosen(self, mask: Mask | None) -> dict[torch.dtype, Tensor] | None:
        """The columns of a mask that is given by indices, which are few and hold no buffers; else None."""
        if mask is None or not all(isinstance(columns, Tensor) for columns in mask.columns.values()):
            return None
        self.population.refresh_()
        return self.population._chosen(mask.columns)

    def _mask(self, context: AveragingContext) -> Mask | None:
        population, active = self.population, self.population.active
        if len(active) == context.size:
            return self.rule.mask(context, population._layout)
        return self.rule.mask_among(context, population._layout, active)

    def check_health(self, distances: Tensor | None = None) -> tuple[NonFiniteMember, ...]:
        """Check for non-finite members now and apply the policy; `step` does so before each averaging."""
        return () if self.health is None else self._restarted(self.health.check_(self.num_steps_taken, distances))

    def _restarted(self, found: tuple[NonFiniteMember, ...]) -> tuple[NonFiniteMember, ...]:
        """Restart the rule's rows of members that were found non-finite."""
        if found:
            self._rows.restart_([one.member for one in found])
        return found

    def _check(
        self,
        context: AveragingContext,
        distances: Tensor | None = None,
        chosen: Mapping[torch.dtype, Tensor] | None = None,
    ) -> tuple[NonFiniteMember, ...]:
        """`check_health`; and raise unless all processes are at the same learning rate.

        Without a health check, a delayed push must not wait for other processes, so it skips this too.
        """
        if self.health is not None:
            found = self.health.check_(self.num_steps_taken, distances, context.lr_ratio, chosen)
            return self._restarted(found)
        if not self.rule.num_delay_steps:
            self.population.refresh_()  # before others may read these rows from shared memory
            check_one_ratio(*self.population.group.all_max(context.lr_ratio, -context.lr_ratio))
        return ()

    def _look(self, context: AveragingContext, distances: Tensor | None = None) -> AveragingContext:
        """The context with what the rule looks at, and with its new state."""
        context = observed(self.population, self.rule, context, distances)
        self.rule_state = self.rule.next_state(context)
        return replace(context, state=self.rule_state)

    def _matrix(self, context: AveragingContext) -> Tensor:
        active, rows = self.population.active, self.rule.extra_rows
        if len(active) == context.size:
            return self.rule.matrix(context)
        matrix = self.rule.matrix_among(context, active)
        if rows and self.rule.own_matrix(context) is None:
            return mixing.among_extended(matrix, active, context.size, [row.per_member for row in rows])
        return mixing.among(matrix, active, context.size)

    def _start_delayed(self, context: AveragingContext, start: float) -> None:
        mask = self._mask(context)
        self._nonfinite_at_start = self.found_nonfinite = self._check(context)
        context = self._look(context)
        due = context.step + self.rule.num_delay_steps
        bytes_before = self.population.group.bytes_sent
        if self.rule.target is not None:
            wait = self._rows.begin_update(self._matrix(context), mask)
            self._pending = self._delayed_step(wait, context.step, due, mask)
        else:
            keep = self.rule.keep(context)
            assert keep is not None, "without a target, only pushes have a delay"
            self._pending = DelayedPush.start(self.population, keep, due)
        self._pending.bytes_before = bytes_before
        self._seconds_to_start = time.perf_counter() - start

    def _delayed_step(self, wait: Callable[[], None] | None, started: int, due: int, mask: Mask | None) -> DelayedStep:
        assert self.rule.target is not None
        return DelayedStep(self._rows, wait, started=started, due=due, target=self.rule.target, mask=mask)

    def _apply_pending(self, start: float) -> Averaging | None:
        push = self._pending
        if push is None or self.num_steps_taken < push.due:
            return None
        push.apply_(self.population)
        self._pending = None
        self.num_averagings += 1
        before = None
        if self.measure and push.squared_distances is not None:
            squares = push.squared_distances
            if self.population._is_sharded:
                squares = self.population.group.sum_over_shards(squares)
            before = tuple(self.population.group.all_gather(squares.sqrt().tolist()))
        num_bytes = self.population.group.bytes_sent - push.bytes_before
        seconds = self._seconds_to_start + time.perf_counter() - start
        found, self._nonfinite_at_start = self._nonfinite_at_start, ()
        rule = type(self.rule).__name__
        return Averaging(self.num_steps_taken, rule, push.keep, before, None, found, num_bytes, seconds)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to continue exactly."""
        state: dict[str, Any] = {
            "num_steps_taken": self.num_steps_taken,
            "num_averagings": self.num_averagings,
            "highest_lrs": list(self._rates.highest),
        }
        if self.rule_state:
            state["rule"] = dict(self.rule_state)
        pending = self.pending_states()
        if any(map(any, pending)):
            state["pending"] = pending
        if self._nonfinite_at_start:
            state["nonfinite_at_start"] = [asdict(found) for found in self._nonfinite_at_start]
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
        self._nonfinite_at_start = tuple(NonFiniteMember(**found) for found in state.get("nonfinite_at_start", ()))
        self.population.dropped = dropped
        self.load_pending_states(state.get("pending", [({}, {})] * len(self.population)))

    def checked_rule_state(self, state: Any) -> Mapping[str, Any]:
        """A saved state of the rule, or a `MixingError`; the initial state for None."""
        initial = self.rule.initial_state(self.population.size)
        if state is None:
            return initial
        if not isinstance(state, Mapping) or state.keys() != initial.keys():
            expected = ", ".join(initial) or "nothing"
            raise MixingError(f"the state of {type(self.rule).__name__} is {state!r}, expected {expected}")
        return dict(state)

    def pending_states(self) -> list[PendingState]:
        """For each local member, what an unfinished averaging needs to continue; empty between averagings.

        Waits for the mean of a delayed push, but does not apply it early.
        """
        if self._pending is not None:
            self._pending.settle(self.population)  # until then the last means may still change
        means = {
            f"mean.{dtype_name(dtype)}": mean.clone() for dtype, mean in self.population.group.last_means().items()
        }
        states: list[PendingState] = []
        for index in range(len(self.population)):
            tensors, numbers = {**means, **self._rows.tensors_of(index)}, {}
            if self._pending is not None:
                rows, push = self._pending.member_state(self.population, index)
                tensors.update({f"push.{name}": row for name, row in rows.items()})
                numbers = dict(push)
            states.append((tensors, numbers))
        return states

    def pending_templates(self) -> dict[str, Tensor]:
        """Tensors of the shapes and dtypes that `pending_states` may contain for a member."""
        rows = {dtype_name(dtype): matrix[0] for dtype, matrix in self.population.matrices.items()}
        wide = {name: row if row.element_size() >= 4 else row.float() for name, row in rows.items()}
        extra = {f"row.{one.name}.{name}": row for one in self.rule.extra_rows for name, row in rows.items()}
        pushes = {f"push.{name}": row for name, row in rows.items()}
        return pushes | {f"mean.{n}": row for n, row in wide.items()} | extra

    def row_names(self, member: int) -> list[str]:
        """The names of the rule's own rows in the state of a member."""
        return self._rows.names_of(member)

    def load_pending_states(self, states: Sequence[PendingState]) -> None:
        """Continue from `pending_states`, for the members that are local now."""
        tensors, numbers = states[0]
        matrices = {dtype_name(dtype): rows for dtype, rows in self.population.matrices.items()}
        self.population.group.set_last_means(
            {
                rows.dtype: tensors[f"mean.{name}"].to(rows.device)
                for name, rows in matrices.items()
                if f"mean.{name}" in tensors
            }
        )
        pushes = [
            ({name.removeprefix("push."): row for name, row in rows.items() if name.startswith("push.")}, push)
            for rows, push in states
        ]
        self._rows.load_([tensors for tensors, _ in states])
        if "started" in numbers:
            started = int(numbers["started"])
            mask = self._mask(AveragingContext(step=started, size=self.population.size, lr_ratio=1.0))
            self._pending = self._delayed_step(None, started, int(numbers["due"]), mask)
        else:
            self._pending = DelayedPush.from_member_states(pushes, self.population) if numbers else None


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
