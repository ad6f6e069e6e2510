"""Candidate scoring: what rules that select need to know about members, and about children before they are made."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from papa import layout
from papa.lab.analysis import repair_toward_members
from papa.lab.selection import Mutation
from papa.soup import After, greedy_soup
from papa.training import Training


class CandidateScorer:
    """Scores members and candidates on a training's validation data, for the rules of `papa.lab.selection`.

    With REPAIR, children are scored after REPAIR on data without augmentation; with mutation, with the noise they
    would get.
    """

    def __init__(self, training: Training, mutation: Mutation | None = None) -> None:
        self.training, self.mutation = training, mutation
        self.repairs = training.batches.num_repair_batches > 0
        self._buffer: nn.Module | None = None
        self._repair: tuple[int, After | None] = (-1, None)

    def losses(self) -> list[float]:
        members, _ = self.training.evaluate_population(self.training.data.validation)
        return [member.loss for member in members]

    def greedy_members(self) -> tuple[int, ...]:
        """The members of the greedy soup now."""
        validation = self.training.data.validation
        return greedy_soup(
            self.training.population, lambda network: self.training.evaluate([network], validation)[0][0]
        ).members

    def candidate_losses(self, rows: Tensor, candidates: Sequence[int]) -> list[float]:
        """The losses of the networks that rows of weights would make; each process scores its share."""
        population, group = self.training.population, self.training.group
        mine, losses = group.local_range(len(rows)), []
        repair = self._repair_now() if self.repairs else None
        for number, (row, candidate) in enumerate(zip(rows, candidates, strict=True)):
            tensors = population._combined(row)
            if number in mine:
                network = self._make_child(tensors, row, candidate, repair)
                losses.append(self.training.evaluate([network], self.training.data.validation)[0][0].loss)
        return group.all_gather(losses)

    def survivors(self, children: Sequence[int | None]) -> None:
        """Give each member the noise of the child it becomes; parents that survive get none."""
        if self.mutation is not None:
            self.mutation.keys = dict(enumerate(children))

    def _repair_now(self) -> After | None:
        """Repairs a child toward its parents; every member's statistics are computed once per averaging."""
        now, training = self.training.averager.num_steps_taken, self.training
        if self._repair[0] != now:
            members, scope = range(training.population.size), training.settings.averaging.repaired_layers
            batches = training.batches.plain_repair()
            self._repair = now, repair_toward_members(training.population, members, batches, scope=scope)
        return self._repair[1]

    @torch.no_grad()
    def _make_child(self, tensors: dict[str, Tensor], row: Tensor, candidate: int, repair: After | None) -> nn.Module:
        if self._buffer is None:
            self._buffer = copy.deepcopy(self.training.population[0])
        for name, tensor in layout.named_tensors(self._buffer, tensors).items():
            tensor.copy_(tensors[name])
        is_child = int((row != 0).sum()) > 1
        if is_child and repair is not None:
            repair(self._buffer, row)
        if is_child and self.mutation is not None:
            averager = self.training.averager
            self.mutation.mutate_(
                self._buffer, candidate, step=averager.num_steps_taken, generation=averager.num_averagings + 1
            )
        return self._buffer
