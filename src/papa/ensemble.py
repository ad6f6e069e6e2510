"""The ensemble: averaged predictions, the yardstick every soup is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from papa.errors import SoupError
from papa.population import Population


def mean_logits(outputs: Tensor) -> Tensor:
    """The mean over members of their logits, `(p, ...) -> (...)`; what the paper reports."""
    return outputs.mean(dim=0)


def mean_probabilities(outputs: Tensor) -> Tensor:
    """The log of the mean over members of their class probabilities (classes on the axis after the batch)."""
    return torch.logsumexp(torch.log_softmax(outputs, dim=2), dim=0) - torch.log(torch.tensor(float(len(outputs))))


class Ensemble(nn.Module):
    """A module that runs every member and averages what they say; `p` times the cost of one.

    Example:
        >>> ensemble = Ensemble([nn.Linear(4, 2) for _ in range(3)])
        >>> ensemble(torch.zeros(5, 4)).shape
        torch.Size([5, 2])

    Args:
        members: a population or modules. They are shared, not copied; those that were dropped are left out. Where
            several processes hold the population, all must ask with the same input, and what the others' members say
            carries no gradient.
        combine: how the members' stacked outputs become one: `mean_logits` or `mean_probabilities`.
    """

    def __init__(self, members: Iterable[nn.Module], *, combine: Callable[[Tensor], Tensor] = mean_logits) -> None:
        super().__init__()
        self._gather: Callable[[list[Tensor]], list[Tensor]] = list
        if isinstance(members, Population):
            if members.size != len(members):
                self._gather = members.group.all_gather
            members = [net for member, net in zip(members.members, members, strict=True) if member in members.active]
        self.members = nn.ModuleList(members)
        self.combine = combine
        if not len(self.members) and self._gather is list:
            raise SoupError("an ensemble needs at least one network, got none")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The combined output of all members for the same input."""
        outputs = [member(*args, **kwargs) for member in self.members]
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                raise SoupError(f"an ensemble averages tensors, member {index} returned {type(output).__name__}")
        if self._gather is not list:
            outputs = self._gather([output.detach() for output in outputs])
        return self.combine(torch.stack(outputs))
