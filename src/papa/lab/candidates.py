"""What natural selection needs to know of a training: how good members are, and children that are not yet born."""

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
from papa.training.loop import Training


class CandidateScorer:
    """Answers the questions of rules that select (`papa.lab.selection`), on a training's validation data.

    Args:
        training: whose population is bred. Where members are repaired, children are judged after REPAIR on data without
            augmentation; where they mutate, with the noise that they will live with.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.repaired = training.batches.num_repair_batches > 0
        self._pot: nn.Module | None = None
        self._moments: tuple[int, list[dict[str, ChannelStatistics]]] = (-1, [])

    @property
    def mutation(self) -> Mutation | None:
        """What children get, besides being averages."""
        return self.training.mutation

    def losses(self) -> list[float]:
        """Every member's loss."""
        members, _ = self.training.evaluate_population(self.training.data.validation)
        return [member.loss for member in members]

    def greedy_members(self) -> tuple[int, ...]:
        """Who is in the greedy soup now."""
        validation = self.training.data.validation
        return greedy_soup(
            self.training.population, lambda network: self.training.evaluate([network], validation)[0][0]
        ).members

    def candidate_losses(self, rows: Tensor, candidates: Sequence[int]) -> list[float]:
        """The losses of the networks that rows of weights would make; each process judges its share of them."""
        population, group = self.training.population, self.training.group
        mine, losses = group.local_range(len(rows)), []
        moments = self._parents_moments() if self.repaired else []
        for number, (row, candidate) in enumerate(zip(rows, candidates, strict=True)):
            tensors = population.combined(row)
            if number in mine:
                network = self._born(tensors, row, candidate, moments)
                losses.append(self.training.evaluate([network], self.training.data.validation)[0][0].loss)
        return group.all_gather(losses)

    def survivors(self, candidates: Sequence[int]) -> None:
        """Let each member get the noise of the candidate it becomes; parents get none."""
        if self.mutation is not None:
            num_children = 6 * len(candidates)
            self.mutation.keys = {
                member: candidate if candidate < num_children else None for member, candidate in enumerate(candidates)
            }

    def _parents_moments(self) -> list[dict[str, ChannelStatistics]]:
        """Every member's activation statistics, taken once for each averaging."""
        step, moments = self._moments
        now = self.training.averager.num_steps_taken
        if step != now:
            batches = self.training.batches.plain_repair_batches()
            here = [layer_statistics(model, batches) for model in self.training.population]
            self._moments = now, moments = now, self.training.group.all_gather(here)
        return moments

    @torch.no_grad()
    def _born(
        self, tensors: dict[str, Tensor], row: Tensor, candidate: int, moments: Sequence[dict[str, ChannelStatistics]]
    ) -> nn.Module:
        if self._pot is None:
            self._pot = copy.deepcopy(self.training.population[0])
        for name, tensor in layout.named_tensors(self._pot, tensors).items():
            tensor.copy_(tensors[name])
        is_child = int((row != 0).sum()) > 1
        if is_child and self.repaired:
            repair_toward_(self._pot, goals_of(moments, row), self.training.batches.plain_repair_batches())
        if is_child and self.mutation is not None:
            averager = self.training.averager
            self.mutation.mutate_(
                self._pot, candidate, step=averager.num_steps_taken, generation=averager.num_averagings + 1
            )
        return self._pot
