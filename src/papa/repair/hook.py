"""REPAIR around a merge: the members before it are the parents, the members after it the children."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.group import gather_or_raise
from papa.population import Population
from papa.repair.batch_norm import reset_batch_norm_
from papa.repair.repair import goals_of, repair_toward_
from papa.repair.statistics import ChannelStatistics, layer_statistics
from papa.rules import AveragingContext

BatchesFor: TypeAlias = Callable[[int], Sequence[Any]]
"""From a member's index to the batches on which its statistics are taken."""


class RepairMerges:
    """Repairs every member of a population after a merge; handed to an `Averager` as `around`.

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
        batches_for: the batches on which a member's statistics are taken: the same data for all, under each member's
            own augmentation policy (the paper's form, two passes for each member), or one list for all (one pass for
            each member and one for each distinct child).
        exact: go layer by layer, as `repair_` does.
    """

    def __init__(self, batches_for: BatchesFor, *, exact: bool = False) -> None:
        self.batches_for = batches_for
        self.exact = exact

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Take the parents' statistics, let them be merged, and repair the children."""
        batches = [self.batches_for(member) for member in population.members]
        here = list(zip(population.members, population, batches, strict=True))
        parents: list[dict[str, ChannelStatistics]] = gather_or_raise(
            population.group,
            lambda: [layer_statistics(model, its, subject=f"member {member}") for member, model, its in here],
        )
        yield
        for index, row in _distinct_children(population, matrix, batches):
            repair_toward_(population[index], goals_of(parents, row), batches[index], exact=self.exact)


class ResetBatchNormAfterMerges:
    """Re-estimates the BatchNorm statistics of every member after a merge, and changes nothing else.

    Where every convolution is followed by BatchNorm this is what REPAIR amounts to in function, for one pass over the
    batches for each distinct child and none for the parents. REPAIR also rescales the weights, whose only effect there
    is on how far the next optimizer steps go.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> batches = [torch.randn(32, 4) for _ in range(5)]
        >>> reset = ResetBatchNormAfterMerges(lambda member: batches)
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=reset)

    Args:
        batches_for: as for `RepairMerges`.
    """

    def __init__(self, batches_for: BatchesFor) -> None:
        self.batches_for = batches_for

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Let members be merged, then re-estimate."""
        yield
        batches = [self.batches_for(member) for member in population.members]
        for index, _ in _distinct_children(population, matrix, batches):
            reset_batch_norm_(population[index], batches[index])


def _distinct_children(
    population: Population, matrix: Tensor, batches: Sequence[Sequence[Any]]
) -> Iterator[tuple[int, Tensor]]:
    """Index and row of each distinct child held here, to be repaired; the others then become copies.

    Children that were merged alike and see the same batches are the same: one repair serves them all. A copy of
    one member, itself or another, needs none.
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
