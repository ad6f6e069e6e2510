"""REPAIR around a merge: the members before it are the parents, the members after it the children."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from papa.population import Population
from papa.repair.moments import Moments, layer_moments
from papa.repair.repair import goals_of, repair_toward_
from papa.rules import Moment


class RepairMerges:
    """Repairs every member of a population after a merge; handed to an `Averager` as `around`.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> batches = [torch.randn(32, 4) for _ in range(5)]
        >>> repair = RepairMerges(lambda member: batches)
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), around=repair)
        >>> averager.step().rule
        'MergeAll'

    Args:
        batches_for: the batches on which a member's statistics are taken: the same data for all, under each member's
            own augmentation policy (the paper's form, two passes for each member), or one list for all.
        exact: go layer by layer, as `repair_` does.
    """

    def __init__(self, batches_for: Callable[[int], Sequence[Any]], *, exact: bool = False) -> None:
        self.batches_for = batches_for
        self.exact = exact

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, moment: Moment) -> Iterator[None]:
        """Take the parents' statistics, let them be merged, and repair the children."""
        batches = [self.batches_for(member) for member in population.members]
        parents: list[dict[str, Moments]] = population.group.gather(
            [
                layer_moments(model, its_batches, subject=f"member {member}")
                for member, model, its_batches in zip(population.members, population, batches, strict=True)
            ]
        )
        yield
        repaired: dict[tuple[int, tuple[float, ...]], int] = {}
        for index, member in enumerate(population.members):
            row = matrix[member]
            twin = repaired.setdefault((id(batches[index]), tuple(row.tolist())), index)
            if twin == index:
                repair_toward_(population[index], goals_of(parents, row), batches[index], exact=self.exact)
            else:
                _copy_(population, twin, index)


@torch.no_grad()
def _copy_(population: Population, source: int, target: int) -> None:
    """Children that were merged alike and see the same batches are the same: one repair serves them all."""
    others = dict(population[source].named_parameters()) | dict(population[source].named_buffers())
    for name, tensor in (*population[target].named_parameters(), *population[target].named_buffers()):
        if name in population.averaged:
            tensor.copy_(others[name])
