"""A delayed push: members train on while their mean is computed.

At step `t` each member's weights are copied and the mean of all members is started. `d` steps later each member gets

    w_j <- w_j + (1 - a) (mean_t - w_{j,t})

with its own weights of step `t`. These corrections sum to zero over members, so the population mean stays where
training brought it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.core.population import Population
from papa.core.product import column_blocks
from papa.errors import MemberError

Rows: TypeAlias = dict[torch.dtype, Tensor]
MemberPush: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, Any]]


class DelayedPush:
    """A push that was started and has not been applied yet.

    `rows` are a copy of those of the local members at the start, whose tensors have the memory order `strides`. `wait`
    waits for the mean of all rows at the start; None if `rows` are the corrections already. `bytes_before` is what the
    group had sent at the start.
    """

    def __init__(
        self,
        keep: float,
        due: int,
        rows: Rows,
        wait: Callable[[], Rows] | None,
        *,
        strides: tuple[tuple[int, ...], ...],
        bytes_before: int = 0,
    ) -> None:
        self.keep, self.due, self.bytes_before = keep, due, bytes_before
        self.squared_distances: Tensor | None = None
        self._rows, self._wait, self._strides = rows, wait, strides

    @staticmethod
    def start(population: Population, keep: float, due: int) -> DelayedPush:
        """Copy the local rows and start computing the mean."""
        before = population.group.bytes_sent
        snapshot, wait = population._start_mean()
        return DelayedPush(keep, due, snapshot, wait, strides=population._strides, bytes_before=before)

    def settle(self, population: Population) -> None:
        """Wait for the mean."""
        self.corrections(population)

    def corrections(self, population: Population) -> Rows:
        """Wait for the mean; returns what will be added to the local rows, by dtype."""
        if self._wait is not None:
            means, self._wait = self._wait(), None
            squares = None
            for dtype, rows in self._rows.items():
                rows.neg_().add_(means[dtype])
                found = squared_lengths(rows[:, : population._num_parameter_columns(dtype)])
                squares = found if squares is None else squares + found
                rows.mul_(1.0 - self.keep)
                for index, member in enumerate(population.members):
                    if member in population.dropped:
                        rows[index].zero_()
            self.squared_distances = squares
        return self._rows

    def apply_(self, population: Population) -> None:
        """Add the corrections to the local members."""
        corrections = self.corrections(population)
        population.refresh_()
        if population._strides != self._strides:
            raise MemberError(
                "members were converted to another memory order during a delayed push: convert them before training, "
                "or between pushes"
            )
        for dtype, rows in population._local_rows().items():
            rows.add_(corrections[dtype])
        population.mark_changed_()

    def member_state(self, population: Population, index: int) -> MemberPush:
        """What a checkpoint needs of one local member; waits for the mean."""
        corrections = self.corrections(population)
        assert self.squared_distances is not None
        tensors = {dtype_name(dtype): rows[index] for dtype, rows in corrections.items()}
        return tensors, {"keep": self.keep, "due": self.due, "square": float(self.squared_distances[index])}

    @staticmethod
    def from_member_states(states: Sequence[MemberPush], population: Population) -> DelayedPush:
        """The push whose `member_state` of each local member was saved."""
        rows = {
            dtype: torch.stack([tensors[dtype_name(dtype)] for tensors, _ in states]).to(here.device)
            for dtype, here in population._local_rows().items()
        }
        numbers = states[0][1]
        push = DelayedPush(
            numbers["keep"],
            numbers["due"],
            rows,
            None,
            strides=population._strides,
            bytes_before=population.group.bytes_sent,
        )
        push.squared_distances = torch.tensor(
            [one["square"] for _, one in states], dtype=torch.float64, device=next(iter(rows.values())).device
        )
        return push


def squared_lengths(rows: Tensor) -> Tensor:
    """The squared Euclidean length of each row, in float64 on their device; independent of the other rows."""
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows, num_rows=1):
        wide = block if block.element_size() >= 4 else block.float()
        total += torch.stack([torch.linalg.vector_norm(row) for row in wide]).double().square()
    return total


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files."""
    return str(dtype).removeprefix("torch.")
