"""Alignment before members are mixed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa.align.groups import Symmetries
from papa.align.matching import Alignment, Plan, matched_to
from papa.align.permute import permute_all_
from papa.errors import MixingError, PapaError
from papa.population import Population
from papa.rules import AveragingContext


class AlignMerges:
    """Aligns every member to the first before a merge; handed to an `Averager` as `around`.

    The symmetries are derived once and kept. Members may be held by several processes.

    Example:
        >>> from torch import nn
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> align = AlignMerges([torch.randn(32, 4) for _ in range(5)])
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=align)
        >>> averager.step().rule
        'MergeAll'
        >>> [alignment.after >= alignment.before for alignment in align.alignments]
        [True, True]

    Args:
        batches: as for `align_`: the same for all members and all merges.
        by: as for `align_`.
        groups: as for `align_`.
        optimizers: one for each member held here, whose state (momentum and the like) moves with the parameters; a
            member without it would take steps meant for other units. None to leave it alone, as the paper does.
        every_steps: align only at the first averaging in every so many steps; 1 for at every averaging.
        seed: of the sequence in which groups are gone through.
    """

    def __init__(
        self,
        batches: Any = None,
        *,
        by: str | None = None,
        groups: Symmetries | None = None,
        optimizers: Iterable[Optimizer] = (),
        every_steps: int = 1,
        seed: int = 0,
    ) -> None:
        if every_steps < 1:
            raise MixingError(f"every_steps is {every_steps}, expected a whole number of steps, at least 1")
        self.every_steps = every_steps
        self.alignments: list[Alignment] = []
        """How the members held here matched the last time, the first member left out."""
        self._optimizers = list(optimizers)
        self._plan = Plan(batches, by=by, groups=groups, seed=seed)

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Align, then let the members be mixed."""
        if context.is_first_since(self.every_steps):
            self.align_(population)
        yield

    @torch.no_grad()
    def align_(self, population: Population) -> None:
        """Align every member to the first, now. Every process that holds members must call it."""
        if self._optimizers and len(self._optimizers) != len(population):
            raise PapaError(
                f"AlignMerges has {len(self._optimizers)} optimizers for {len(population)} members, expected one for "
                "each member held here"
            )
        here = [index for index, member in enumerate(population.members) if member]
        found = matched_to(population, 0, here, self._plan)
        self.alignments = list(found.values())
        for index, alignment in found.items():
            permute_all_(
                population[index],
                self._plan.symmetries_of(population[index]),
                alignment.permutations,
                optimizer=self._optimizers[index] if self._optimizers else None,
            )
