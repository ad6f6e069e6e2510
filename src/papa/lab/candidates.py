"""Candidate scoring: what rules that select need to know about members, and about children before they are made."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from papa import layout
from papa.lab.selection import Mutation
from papa.repair import goals_of, layer_statistics, repair_toward_
from papa.repair.statistics import ChannelStatistics
from papa.soup import greedy_soup
from papa.training import Training


class CandidateScorer:
    """Scores members and candidates on a training's validation data, for the rules of `papa.lab.selection`.

    With REPAIR, children are scored after REPAIR on data without augmentation; with mutation, with the noise they
    would get.

    Args:
        training: whose members are scored.
        mutation: what members get after averaging, if anything.
    """

    def __init__(self, training: Training, mutation: Mutation | None = None) -> None:
        self.training, self.mutation = training, mutation
        self.repairs = training.batches.num_repair_batches > 0
        self._buffer: nn.Module | None = None
        self._statistics: tuple[int, list[dict[str, ChannelStatistics]]] = (-1, [])

    def losses(self) -> list[float]:
        """Every member's loss."""
        members, _ = self.training.evaluate_population(self.training.data.validation)
        return [member.loss for member in members]

    def greedy_members(self) -> tuple[int, ...]:
        """The members of the greedy soup now."""
        validation = self.training.data.validation
        return greedy_soup(
            self.training.population,
            lambda network: self.training.evaluate([network], validation)[0][0],
            higher_is_better=self.training.task.higher_is_better,
        ).members

    def candidate_losses(self, rows: Tensor, candidates: Sequence[int]) -> list[float]:
        """The losses of the networks that rows of weights would make; each process scores its share."""
        population, group = self.training.population, self.training.group
        mine, losses = group.local_range(len(rows)), []
        statistics = self._parent_statistics() if self.repairs else []
        for number, (row, candidate) in enumerate(zip(rows, candidates, strict=True)):
            tensors = population._combined(row)
            if number in mine:
                network = self._make_child(tensors, row, candidate, statistics)
                losses.append(self.training.evaluate([network], self.training.data.validation)[0][0].loss)
        return group.all_gather(losses)

    def survivors(self, children: Sequence[int | None]) -> None:
        """Give each member the noise of the child it becomes; parents that survive get none."""
        if self.mutation is not None:
            self.mutation.keys = dict(enumerate(children))

    def _parent_statistics(self) -> list[dict[str, ChannelStatistics]]:
        """Every member's activation statistics, computed once per averaging."""
        step, statistics = self._statistics
        now = self.training.averager.num_steps_taken
        if step != now:
            batches = self.training.batches.plain_repair()
            local = [layer_statistics(model, batches) for model in self.training.population]
            self._statistics = now, statistics = now, self.training.group.all_gather(local)
        return statistics

    @torch.no_grad()
    def _make_child(
        self,
        tensors: dict[str, Tensor],
        row: Tensor,
        candidate: int,
        statistics: Sequence[dict[str, ChannelStatistics]],
    ) -> nn.Module:
        if self._buffer is None:
            self._buffer = copy.deepcopy(self.training.population[0])
        for name, tensor in layout.named_tensors(self._buffer, tensors).items():
            tensor.copy_(tensors[name])
        is_child = int((row != 0).sum()) > 1
        if is_child and self.repairs:
            scope, batches = self.training.settings.averaging.repaired_layers, self.training.batches.plain_repair()
            repair_toward_(self._buffer, goals_of(statistics, row), batches, scope=scope)
        if is_child and self.mutation is not None:
            averager = self.training.averager
            self.mutation.mutate_(
                self._buffer, candidate, step=averager.num_steps_taken, generation=averager.num_averagings + 1
            )
        return self._buffer
