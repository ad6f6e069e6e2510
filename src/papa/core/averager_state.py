"""The state of an averager in checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from torch import Tensor

from papa.core.delayed import DelayedPush, dtype_name
from papa.core.health import NonFiniteMember
from papa.core.learning_rates import LearningRates
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.couplings.extra_rows import DelayedStep, ExtraRows
from papa.couplings.masks import Mask
from papa.errors import MixingError

PendingState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""The unfinished averaging of one member: named tensors, and numbers."""


class AveragerState(ABC):
    """What an averager must save to continue exactly, and how it continues."""

    population: Population
    rule: Rule
    num_steps_taken: int
    num_averagings: int
    rule_state: Mapping[str, Any]
    _rates: LearningRates
    _rows: ExtraRows
    _pending: DelayedPush | DelayedStep | None
    _nonfinite_at_start: tuple[NonFiniteMember, ...]

    @abstractmethod
    def _mask(self, context: AveragingContext) -> Mask | None: ...

    @abstractmethod
    def _delayed_step(self, wait: Any, started: int, due: int, mask: Mask | None) -> DelayedStep: ...

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
            self._pending.settle(self.population)
        states: list[PendingState] = []
        for index in range(len(self.population)):
            tensors, numbers = self._rows.tensors_of(index), {}
            if self._pending is not None:
                rows, push = self._pending.member_state(self.population, index)
                tensors.update({f"push.{name}": row for name, row in rows.items()})
                numbers = dict(push)
            states.append((tensors, numbers))
        return states

    def pending_templates(self) -> dict[str, Tensor]:
        """Tensors of the shapes and dtypes that `pending_states` may contain for a member."""
        rows = {dtype_name(dtype): matrix[0] for dtype, matrix in self.population.matrices.items()}
        extra = {f"row.{one.name}.{name}": row for one in self.rule.extra_rows for name, row in rows.items()}
        return {f"push.{name}": row for name, row in rows.items()} | extra

    def row_names(self, member: int) -> list[str]:
        """The names of the rule's own rows in the state of a member."""
        return self._rows.names_of(member)

    def load_pending_states(self, states: Sequence[PendingState]) -> None:
        """Continue from `pending_states`, for the members that are local now."""
        _, numbers = states[0]
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
