"""Merge hooks that repair members, or re-estimate their BatchNorm statistics, after a merge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.core.population import Population
from papa.core.rules import AveragingContext
from papa.repair.repair import Scope, goals_of, repair_toward_, statistics_of
from papa.repair.statistics import reset_batch_norm_

BatchesFor: TypeAlias = Callable[[int], Sequence[Any]]
"""From a member's index to the batches on which its statistics are computed."""


class RepairMerges:
    """A merge hook that repairs every member after a merge; passed to an `Averager` as `merge_hooks`.

    The members before the merge are the parents, the members after it the children.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> batches = [torch.randn(32, 4) for _ in range(5)]
        >>> repair = RepairMerges(lambda member: batches)
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=repair)
        >>> averager.step().rule
        'MergeAll'

    Args:
        batches_for: the batches for a member's statistics. Either the same examples for all members, each under its
            own augmentation (the paper's algorithm: two passes for each member), or one list for all (one pass for
            each member and one for each distinct child).
        scope: as for `repair_`.
        exact: as for `repair_`.
    """

    def __init__(self, batches_for: BatchesFor, *, scope: Scope = "all", exact: bool = False) -> None:
        self.batches_for = batches_for
        self.scope = scope
        self.exact = exact

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Compute the parents' statistics before the merge, and repair the children after it."""
        batches = [self.batches_for(member) for member in population.members]
        parents = statistics_of(population, batches, range(population.size))
        yield
        for index, row in _distinct_children(population, matrix, batches):
            repair_toward_(
                population[index], goals_of(parents, row), batches[index], scope=self.scope, exact=self.exact
            )


class ResetBatchNormAfterMerges:
    """A merge hook that re-estimates every member's BatchNorm statistics after a merge, and changes nothing else.

    In a network with BatchNorm after every convolution, REPAIR gives networks that compute the same. This needs one
    pass over the batches for each distinct child and none for the parents. REPAIR also rescales the weights, which
    there only changes the relative size of the next optimizer steps. `batches_for` is as for `RepairMerges`.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> batches = [torch.randn(32, 4) for _ in range(5)]
        >>> reset = ResetBatchNormAfterMerges(lambda member: batches)
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=reset)
    """

    def __init__(self, batches_for: BatchesFor) -> None:
        self.batches_for = batches_for

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Re-estimate after the merge."""
        yield
        batches = [self.batches_for(member) for member in population.members]
        for index, _ in _distinct_children(population, matrix, batches):
            reset_batch_norm_(population[index], batches[index])


def _distinct_children(
    population: Population, matrix: Tensor, batches: Sequence[Sequence[Any]]
) -> Iterator[tuple[int, Tensor]]:
    """The index and row of each distinct local child, for the caller to repair; the others become copies of these.

    Children with equal rows and the same batches are equal. A copy of one member needs no repair.
    """
    first: dict[tuple[int, tuple[float, ...]], int] = {}
    for index, member in enumerate(population.members):
        row = matrix[member]
        if int(row.count_nonzero()) == 1:
            continue
        twin = first.setdefault((id(batches[index]), tuple(row.tolist())), index)
        if twin == index:
            yield index, row
        else:
            _copy_(population, twin, index)


@torch.no_grad()
def _copy_(population: Population, source: int, target: int) -> None:
    others = dict(population[source].named_parameters()) | dict(population[source].named_buffers())
    for name, tensor in (*population[target].named_parameters(), *population[target].named_buffers()):
        if name in population.averaged:
            tensor.copy_(others[name])
