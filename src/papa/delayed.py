"""A push whose mean is made while members train on.

At step `t` each member's weights are copied and the mean of all members is begun; `d` steps later each member gets

    w_j <- w_j + (1 - a) (mean_t - w_{j,t})

with its *own* weights of step `t`, not those it has by then. These corrections sum to zero over members, so the
population's mean stays where training brought it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.errors import MemberError
from papa.population import Population
from papa.product import column_blocks

Rows: TypeAlias = dict[torch.dtype, Tensor]
MemberPush: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, Any]]


class PushUnderWay:
    """A push that was begun and has not landed.

    Args:
        keep: `a`, how much of itself each member keeps.
        due: the step after which it lands.
        snapshot: the rows of the members held here when it was begun, by dtype.
        wait: waits for the mean of all rows of that moment.
        strides: the memory order of the tensors in these rows.
        bytes_before: what the group had sent by then.
    """

    def __init__(
        self,
        keep: float,
        due: int,
        snapshot: Rows,
        wait: Callable[[], Rows],
        *,
        strides: tuple[tuple[int, ...], ...],
        bytes_before: int = 0,
    ) -> None:
        self.keep = keep
        self.due = due
        self.bytes_before = bytes_before
        self.squared_distances: Tensor | None = None
        self._rows, self._strides = snapshot, strides
        self._wait: Callable[[], Rows] | None = wait

    @staticmethod
    def begin(population: Population, keep: float, due: int) -> PushUnderWay:
        """Take the copies and begin with the mean."""
        before = population.group.bytes_sent
        snapshot, wait = population.begin_mean()
        return PushUnderWay(keep, due, snapshot, wait, strides=population.strides, bytes_before=before)

    def corrections(self, population: Population) -> Rows:
        """What will be added to the rows held here, once the mean is there; by dtype."""
        if self._wait is not None:
            means, self._wait = self._wait(), None
            squares = torch.zeros(len(population), dtype=torch.float64)
            for dtype, rows in self._rows.items():
                rows.neg_().add_(means[dtype])
                squares += squared_lengths(rows[:, : population.num_parameter_columns(dtype)])
                rows.mul_(1.0 - self.keep)
                for index, member in enumerate(population.members):
                    if member in population.dropped:
                        rows[index].zero_()
            self.squared_distances = squares
        return self._rows

    def land_(self, population: Population) -> None:
        """Add the corrections to the members held here."""
        corrections = self.corrections(population)
        population.refresh_()
        if population.strides != self._strides:
            raise MemberError(
                "members were brought into another memory order while a push was under way: convert them before "
                "training, or between pushes"
            )
        for dtype, rows in population.rows_here().items():
            rows.add_(corrections[dtype])
        population.mark_changed_()

    def member_state(self, population: Population, index: int) -> MemberPush:
        """What a checkpoint needs of one of the members held here, once the mean is there."""
        corrections = self.corrections(population)
        assert self.squared_distances is not None
        tensors = {name_of(dtype): rows[index] for dtype, rows in corrections.items()}
        return tensors, {"keep": self.keep, "due": self.due, "square": float(self.squared_distances[index])}

    @staticmethod
    def resumed(states: Sequence[MemberPush], population: Population) -> PushUnderWay:
        """The push whose `member_state` of each member held here was saved."""
        rows = {
            dtype: torch.stack([tensors[name_of(dtype)] for tensors, _ in states]).to(here.device)
            for dtype, here in population.rows_here().items()
        }
        numbers = states[0][1]
        push = PushUnderWay(
            numbers["keep"],
            numbers["due"],
            rows,
            dict,
            strides=population.strides,
            bytes_before=population.group.bytes_sent,
        )
        push.squared_distances = torch.tensor([one["square"] for _, one in states], dtype=torch.float64)
        push._wait = None
        return push


def squared_lengths(rows: Tensor) -> Tensor:
    """The squared Euclidean length of each row, in float64 on the CPU; the same whoever else's rows are there."""
    total = torch.zeros(len(rows), dtype=torch.float64)
    for block in column_blocks(rows, num_rows=1):
        for index, part in enumerate(block):
            wide = part if part.element_size() >= 4 else part.float()
            total[index] += float(torch.linalg.vector_norm(wide)) ** 2
    return total


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in files."""
    return str(dtype).removeprefix("torch.")
