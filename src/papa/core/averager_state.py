"""The state of an averager in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from papa.core.layout import dtype_name
from papa.core.learning_rates import LearningRates
from papa.core.population import Population
from papa.core.rules import Rule
from papa.couplings.extra_rows import ExtraRows
from papa.errors import MixingError


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
