"""What rules may see of the population: the norms of gradients, and the losses of members and of their mean.

Every number is the same on all processes, so that all of them choose the same matrix. All processes must call these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import mean_network
from papa.errors import MixingError

Probe: TypeAlias = Callable[[nn.Module], float]
"""Maps a network to a number, such as its loss on a batch of validation data."""


def gradient_norms(population: Population) -> tuple[float, ...]:
    """The norm of the gradient that the last backward pass left in each member; NaN for dropped members."""

    def norm_of(index: int) -> float:
        gradients = [parameter.grad for parameter in population[index].parameters() if parameter.grad is not None]
        if not gradients:
            raise MixingError(
                f"member {population.members[index]} has no gradients, and the rule needs their norm: call "
                "averager.step() before optimizer.zero_grad(), with members that train in their own modules"
            )
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double()))

    return _of_members(population, norm_of)


def losses_of_members(population: Population, probe: Probe) -> tuple[float, ...]:
    """What a probe finds in each member; NaN for dropped members."""
    return _of_members(population, lambda index: float(probe(population[index])))


def loss_of_mean(population: Population, probe: Probe) -> float:
    """What a probe finds in the mean of all active members, as the first process finds it."""
    mean = mean_network(population)
    mean.fill_(soup_row(population.size, population.active))
    return gather_or_raise(population.group, lambda: [float(probe(mean.network))])[0]


def check_probe(rule: object, probe: object) -> None:
    """Raise a `MixingError` unless a rule's probe can be called."""
    if not callable(probe):
        raise MixingError(
            f"{type(rule).__name__} has {probe!r} as its probe, expected a function from a network to its loss: "
            "make one with papa.loss_probe(batches, loss)"
        )


def _of_members(population: Population, measure: Callable[[int], float]) -> tuple[float, ...]:
    def measured() -> list[float]:
        dropped = population.dropped
        return [math.nan if member in dropped else measure(i) for i, member in enumerate(population.members)]

    return tuple(gather_or_raise(population.group, measured))
