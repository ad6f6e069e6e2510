"""Ensembles: the average of the predictions of all members."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from papa.core.population import Population
from papa.errors import SoupError
from papa.evaluation.scores import mean_logits


class Ensemble(nn.Module):
    """A module that runs all members and averages their outputs, at `p` times the cost of one network.

    Example:
        >>> ensemble = Ensemble([nn.Linear(4, 2) for _ in range(3)])
        >>> ensemble(torch.zeros(5, 4)).shape
        torch.Size([5, 2])

    Args:
        members: a population or modules; they are shared, not copied. Dropped members are left out. If several
            processes hold the population, all must call the ensemble with the same inputs, and its outputs carry no
            gradient.
        combine: maps the members' stacked outputs to one: `mean_logits` or `mean_probabilities`.
    """

    def __init__(self, members: Iterable[nn.Module], *, combine: Callable[[Tensor], Tensor] = mean_logits) -> None:
        super().__init__()
        self._gather: Callable[[list[Tensor]], list[Tensor]] | None = None
        if isinstance(members, Population):
            if members.size != len(members):
                self._gather = members.group.all_gather
            members = [net for member, net in zip(members.members, members, strict=True) if member in members.active]
        self.members = nn.ModuleList(members)
        self.combine = combine
        if not len(self.members) and self._gather is None:
            raise SoupError("an ensemble needs at least one network, got none")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The combined output of all members for the same inputs."""
        outputs = [member(*args, **kwargs) for member in self.members]
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                raise SoupError(f"an ensemble averages tensors, member {index} returned {type(output).__name__}")
        if self._gather is not None:
            outputs = self._gather([output.detach() for output in outputs])
        return self.combine(torch.stack(outputs))
