"""The averager: counts optimizer steps and applies a rule when it is due."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from papa import mixing
from papa.delayed import PushUnderWay, name_of
from papa.errors import MixingError
from papa.health import Health, NonFiniteMember, check_one_ratio
from papa.learning_rates import LearningRates, check_owners, clamped
from papa.population import Population
from papa.rules import AveragingContext, Independent, Push, Rule

MergeHook: TypeAlias = Callable[[Population, Tensor, AveragingContext], AbstractContextManager[None]]
"""What happens right before and right after members are mixed, given the population, the matrix and the context."""

InFlight: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""What averaging has under way for one member: named tensors, and numbers."""


def chain(*arounds: MergeHook) -> MergeHook:
    """Several things around a mix as one: the first is the outermost, so it begins first and ends last.

    Example:
        >>> @contextlib.contextmanager
        ... def note(population, matrix, context):
        ...     print("before", context.step)
        ...     yield
        ...     print("after", context.step)
        >>> from torch import nn
        >>> around = chain(note, note)
        >>> with around(Population([nn.Linear(2, 1)]), Tensor([[1.0]]), AveragingContext(step=3, size=1, lr_ratio=1.0)):
        ...     print("mix")
        before 3
        before 3
        mix
        after 3
        after 3
    """

    @contextlib.contextmanager
    def together(population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for around in arounds:
                stack.enter_context(around(population, matrix, context))
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
    nonfinite: tuple[NonFiniteMember, ...] = ()
    """Members that were found sick right before, and what was done about them."""
    bytes: int = field(default=0, compare=False)
    """What this process sent to others for it."""
    seconds: float = field(default=0.0, compare=False)
    """How long training stood still for it in this process."""


MOST_ALPHA_OF_FEW_BITS = 0.9
"""Of a push on weights of 16 bits: a weaker one moves most of them by less than half a bit, which is not at all."""


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
        optimizers: the members' optimizers (or one for all), read for the learning rate that scales `Push`: that of
            the first parameter group. Without them, and without passing `lr_ratio` to `step`, a push is not scaled.
        num_steps: how many steps training has in all; merges then leave out the last.
        merge_hooks: makes a context for each averaging from population, matrix and context, such as
            `papa.repair.RepairMerges` or `papa.AlignMerges`; several with `papa.averager.chain`.
        measure: record distances to the mean, at the price of reading the matrix once more (twice for a merge).
        on_nonfinite: what to do with a member whose numbers are not finite, before it poisons the mean: `restart` it from the
            mean of the healthy ones with fresh optimizer state, `drop` it, `stop` with an error; None not to look.
            Without averaging there is no mean to restart from: then `restart` drops.
        unhealthy_reason: what else is wrong with a member held here, by its index, such as its loss; None when nothing is.
    """

    def __init__(
        self,
        population: Population,
        rule: Rule,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        num_steps: int | None = None,
        measure: bool = True,
        merge_hooks: MergeHook | None = None,
        on_nonfinite: str | None = "restart",
        unhealthy_reason: Callable[[int], str | None] | None = None,
    ) -> None:
        _check_kinds(population, rule)
        rule.check_size(population.size)
        if num_steps is not None and num_steps < 0:
            raise MixingError(f"num_steps is {num_steps}, expected the number of steps of the whole training")
        self.population = population
        self.rule = rule
        self.num_steps = num_steps
        self.measure = measure
        self.merge_hooks = merge_hooks
        self._under_way: PushUnderWay | None = None
        self._seconds_to_begin = 0.0
        self._sick_at_begin: tuple[NonFiniteMember, ...] = ()
        self.found_nonfinite: tuple[NonFiniteMember, ...] = ()
        """Members that the last step found sick: also where it began a push, which tells of them when it lands."""
        if merge_hooks is not None and self._delay:
            raise MixingError("a Push with a delay cannot have something around it: members train on meanwhile")
        self.num_steps_taken = 0
        self.num_averagings = 0
        self._rates = LearningRates([optimizers] if isinstance(optimizers, Optimizer) else list(optimizers))
        check_owners(population, self._rates.optimizers)
        if on_nonfinite == "restart" and isinstance(rule, Independent):
            on_nonfinite = "drop"
        self.health = (
            None
            if on_nonfinite is None
            else Health(population, self._rates.optimizers, policy=on_nonfinite, unhealthy_reason=unhealthy_reason)
        )
        self._is_rounded = any(dtype.itemsize < 4 for dtype in population.matrices)
        if self._is_rounded and isinstance(rule, Push) and rule.effective_alpha > MOST_ALPHA_OF_FEW_BITS:
            warnings.warn(
                f"a push that leaves members {rule.effective_alpha:.3g} of themselves is lost in the rounding of "
                "bfloat16 and float16 weights: keep float32 weights and use autocast, or push more strongly and rarely",
                stacklevel=2,
            )
        population.group.check_same(
            {
                **_plain_facts(rule),
                "num_steps": str(num_steps),
                "measure": str(measure),
                "on_nonfinite": str(on_nonfinite),
            },
            cure="give every process the same rule and options",
        )

    def step(self, lr_ratio: float | None = None) -> Averaging | None:
        """Count one optimizer step; average if the rule is due.

        Args:
            lr_ratio: the learning rate as a share of its initial value; None to read it from the optimizers.

        Returns:
            What happened, or None when nothing was due.
        """
        self.num_steps_taken += 1
        if self.num_steps is not None and self.num_steps_taken == self.num_steps + 1:
            warnings.warn(
                f"training goes on after num_steps = {self.num_steps}: merges have left out that step as the last",
                stacklevel=2,
            )
        self.found_nonfinite = ()
        self._rates.note()
        start = time.perf_counter()
        landed = self._land(start)
        if not self.rule.is_due(self.num_steps_taken, self.num_steps):
            return landed
        if lr_ratio is None:
            lr_ratio = self._rates.ratio() if self.rule.uses_lr else 1.0
        context = AveragingContext(
            step=self.num_steps_taken,
            size=self.population.size,
            lr_ratio=clamped(lr_ratio),
            generation=self.num_averagings + 1,
            previous=self.rule.previous(self.num_steps_taken),
        )
        if self._delay:
            self._begin(context, start)
            return None
        return self._average(context, start)

    @property
    def _delay(self) -> int:
        return self.rule.delay if isinstance(self.rule, Push) else 0

    def _average(self, context: AveragingContext, start: float) -> Averaging:
        alpha = self.rule.keep(context.lr_ratio) if isinstance(self.rule, Push) else None
        bytes_before = self.population.group.bytes_sent
        distances = self.population.distances() if self.measure else None
        sick = self.found_nonfinite = self._checked(context, distances)
        if distances is not None and (sick or self.population.dropped):
            distances = self.population.distances()
        before = None if distances is None else tuple(distances.tolist())
        matrix = self._matrix(context)
        with (
            self.merge_hooks(self.population, matrix, context)
            if self.merge_hooks is not None
            else contextlib.nullcontext()
        ):
            # All processes have met to look for sick members; since then only `around` may have moved anything.
            self.population.mix_(matrix, synchronised=self.merge_hooks is None and isinstance(self.rule, Push))
        self.num_averagings += 1
        if before is None or alpha is None or self.merge_hooks is not None or self._is_rounded:
            after = tuple(self.population.distances().tolist()) if self.measure else None
        else:
            after = tuple(alpha * distance for distance in before)  # a push contracts by exactly alpha
        num_bytes = self.population.group.bytes_sent - bytes_before
        seconds = time.perf_counter() - start
        return Averaging(context.step, type(self.rule).__name__, alpha, before, after, sick, num_bytes, seconds)

    def check_health(self, distances: Tensor | None = None) -> tuple[NonFiniteMember, ...]:
        """Look for sick members now and treat them; `step` does so before each averaging."""
        return () if self.health is None else self.health.check_(self.num_steps_taken, distances)

    def _checked(self, context: AveragingContext, distances: Tensor | None = None) -> tuple[NonFiniteMember, ...]:
        """As `check_health`; and raise unless all processes are at the same learning rate.

        Where nobody looks for sick members, a push with a delay waits for nobody, and this is left out.
        """
        if self.health is not None:
            return self.health.check_(self.num_steps_taken, distances, context.lr_ratio)
        if not self._delay:
            self.population.refresh_()  # where rows meet in one mapping, nobody may still be bringing numbers home
            check_one_ratio(*self.population.group.all_max(context.lr_ratio, -context.lr_ratio))
        return ()

    def _matrix(self, context: AveragingContext) -> Tensor:
        active = self.population.active
        if len(active) == context.size:
            return self.rule.matrix(context)
        return mixing.among(self.rule.matrix_among(context, active), active, context.size)

    def _begin(self, context: AveragingContext, start: float) -> None:
        assert isinstance(self.rule, Push)
        keep, due = self.rule.keep(context.lr_ratio), context.step + self._delay
        self._sick_at_begin = self.found_nonfinite = self._checked(context)
        self._under_way = PushUnderWay.begin(self.population, keep, due)
        self._seconds_to_begin = time.perf_counter() - start

    def _land(self, start: float) -> Averaging | None:
        push = self._under_way
        if push is None or self.num_steps_taken < push.due:
            return None
        push.land_(self.population)
        self._under_way = None
        self.num_averagings += 1
        before = None
        if self.measure and push.squared_distances is not None:
            here = push.squared_distances
            if self.population.is_sharded:
                here = self.population.group.sum_over_shards(here)
            before = tuple(self.population.group.all_gather(here.sqrt().tolist()))
        num_bytes = self.population.group.bytes_sent - push.bytes_before
        seconds = self._seconds_to_begin + time.perf_counter() - start
        rule, sick, self._sick_at_begin = type(self.rule).__name__, self._sick_at_begin, ()
        return Averaging(self.num_steps_taken, rule, push.keep, before, None, sick, num_bytes, seconds)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if never stopped."""
        state: dict[str, Any] = {
            "num_steps_taken": self.num_steps_taken,
            "num_averagings": self.num_averagings,
            "highest_lrs": list(self._rates.highest),
        }
        in_flight = self.in_flight()
        if any(map(any, in_flight)):
            state["in_flight"] = in_flight
        if self._sick_at_begin:
            state["sick_at_begin"] = [asdict(sickness) for sickness in self._sick_at_begin]
        if self.population.dropped:
            state["dropped"] = sorted(self.population.dropped)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        missing = {"num_steps_taken", "num_averagings", "highest_lrs"} - set(state)
        if missing:
            raise MixingError(f"the state has no {', '.join(sorted(missing))}: it is not of an averager")
        dropped = frozenset(state.get("dropped", ()))
        if not dropped <= set(range(self.population.size)):
            raise MixingError(
                f"the state dropped members {sorted(dropped)}, this population has {self.population.size}"
            )
        self._rates.load_highest(state["highest_lrs"])
        self.num_steps_taken = int(state["num_steps_taken"])
        self.num_averagings = int(state["num_averagings"])
        self._sick_at_begin = tuple(NonFiniteMember(**sickness) for sickness in state.get("sick_at_begin", ()))
        self.population.dropped = dropped
        self.load_in_flight(state.get("in_flight", [({}, {})] * len(self.population)))

    def in_flight(self) -> list[InFlight]:
        """For each member held here, what averaging has under way: named tensors, and numbers; nothing between pushes.

        A push under way is waited for, but does not land before its time.
        """
        if self._under_way is not None:
            self._under_way.corrections(self.population)  # until then the last means may be about to change
        means = {f"mean.{name_of(dtype)}": mean.clone() for dtype, mean in self.population.group.last_means().items()}
        states: list[InFlight] = []
        for index in range(len(self.population)):
            tensors, numbers = dict(means), {}
            if self._under_way is not None:
                rows, push = self._under_way.member_state(self.population, index)
                tensors.update({f"push.{name}": row for name, row in rows.items()})
                numbers = dict(push)
            states.append((tensors, numbers))
        return states

    def may_be_in_flight(self) -> dict[str, Tensor]:
        """Tensors like those that `in_flight` may name for a member."""
        rows = {name_of(dtype): matrix[0] for dtype, matrix in self.population.matrices.items()}
        wide = {name: row if row.element_size() >= 4 else row.float() for name, row in rows.items()}
        return {f"push.{name}": row for name, row in rows.items()} | {f"mean.{n}": row for n, row in wide.items()}

    def load_in_flight(self, states: Sequence[InFlight]) -> None:
        """Go on with what `in_flight` gave, for the members held here now."""
        tensors, numbers = states[0]
        matrices = {name_of(dtype): rows for dtype, rows in self.population.matrices.items()}
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
        self._under_way = PushUnderWay.resumed(pushes, self.population) if numbers else None


def _check_kinds(population: object, rule: object) -> None:
    if not isinstance(population, Population):
        raise MixingError(f"an averager needs a papa.Population, got a {type(population).__name__}: make one first")
    if not isinstance(rule, Rule):
        found = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
        raise MixingError(f"an averager needs a rule such as papa.Push(alpha=0.99, every_steps=10), got {found}")


def _plain_facts(rule: Rule) -> dict[str, str]:
    """What can be compared between processes: anything but numbers and words may look different and be the same."""
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    plain = {name: str(value) for name, value in values.items() if isinstance(value, int | float | str | None)}
    return {"rule": type(rule).__name__, **plain}
