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
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa.core import mixing
from papa.core.columns import Lines
from papa.core.diagnostics import Diagnostics
from papa.core.health import HealthCheck, Measured, NonFiniteMember, OnNonFinite, check_one_ratio, measure
from papa.core.layout import dtype_name
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.couplings.extra_rows import ExtraRows
from papa.couplings.masks import Mask
from papa.couplings.observation import observed
from papa.couplings.optimizer_state import permute_state_
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


class AveragerState:
    """What an averager must save to continue exactly, and how it continues."""

    population: Population
    rule: Rule
    num_steps_taken: int
    num_averagings: int
    rule_state: Mapping[str, Any]
    _rates: LearningRates
    _rows: ExtraRows

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to continue exactly."""
        state: dict[str, Any] = {
            "num_steps_taken": self.num_steps_taken,
            "num_averagings": self.num_averagings,
            "highest_lrs": list(self._rates.highest),
        }
        if self.rule_state:
            state["rule"] = dict(self.rule_state)
        tensors = self.member_tensors()
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
        self.load_member_tensors_(state.get("tensors", [{}] * len(self.population)))

    def checked_rule_state(self, state: Any) -> Mapping[str, Any]:
        """A saved state of the rule, or a `MixingError`; the initial state for None."""
        initial = self.rule.initial_state(self.population.size)
        if state is None:
            return initial
        if not isinstance(state, Mapping) or state.keys() != initial.keys():
            expected = ", ".join(initial) or "nothing"
            raise MixingError(f"the state of {type(self.rule).__name__} is {state!r}, expected {expected}")
        return dict(state)

    def member_tensors(self) -> list[dict[str, Tensor]]:
        """For each local member, the tensors that a checkpoint needs: the rule's rows."""
        return [self._rows.tensors_of(index) for index in range(len(self.population))]

    def tensor_templates(self) -> dict[str, Tensor]:
        """Tensors of the shapes and dtypes that `member_tensors` may contain for a member."""
        rows = {dtype_name(dtype): matrix[0] for dtype, matrix in self.population.matrices.items()}
        return {f"row.{one.name}.{name}": row for one in self.rule.extra_rows for name, row in rows.items()}

    def row_names(self, member: int) -> list[str]:
        """The names of the rule's own rows in the state of a member."""
        return self._rows.names_of(member)

    def load_member_tensors_(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from `member_tensors`, for the members that are local now."""
        self._rows.load_(states)


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
