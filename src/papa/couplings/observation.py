"""What rules look at: distances, gradient norms, and numbers that a probe finds in networks.

Every number is the same on all processes, so that all of them choose the same matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.rules import AveragingContext, Look, Probe, Rule
from papa.errors import MixingError, did_you_mean


def observed(
    population: Population, rule: Rule, context: AveragingContext, distances: tuple[float, ...] | None = None
) -> AveragingContext:
    """The context with what the rule looks at. All processes must call it."""
    looks = rule.looks_at(context)
    if not looks:
        return context
    probe = _checked_probe(rule, looks)
    if "distances" in looks:
        distances = tuple(population.distances().tolist()) if distances is None else distances
        context = replace(context, distances=distances)
    if "gradient_norms" in looks:
        context = replace(context, gradient_norms=_of_members(population, lambda i: gradient_norm(population[i], i)))
    if "members" in looks:
        context = replace(context, probed=_of_members(population, lambda index: float(probe(population[index]))))
    if "mean" in looks:
        context = replace(context, probed_mean=_of_mean(population, probe))
    return context


def _checked_probe(rule: Rule, looks: tuple[Look, ...]) -> Probe:
    name = type(rule).__name__
    for look in looks:
        if look not in get_args(Look):
            raise MixingError(f"{name} looks at {look!r}: {did_you_mean(str(look), get_args(Look))}")
    probe: Probe | None = getattr(rule, "probe", None)
    if {"members", "mean"} & set(looks) and not callable(probe):
        raise MixingError(
            f"{name} has {probe!r} as its probe, expected a function from a network to a number, such as its loss on "
            "a batch of validation data"
        )
    return probe or (lambda network: math.nan)


def _of_members(population: Population, measure: Callable[[int], float]) -> tuple[float, ...]:
    """A number for each member of the whole population; NaN for dropped members."""

    def measured() -> list[float]:
        dropped = population.dropped
        return [math.nan if member in dropped else measure(i) for i, member in enumerate(population.members)]

    return tuple(gather_or_raise(population.group, measured))


def _of_mean(population: Population, probe: Probe) -> float:
    """The number of the mean of all active members, as the first process finds it."""
    buffer = population._soup_buffer()
    buffer.fill_(soup_row(population.size, population.active))
    return gather_or_raise(population.group, lambda: [float(probe(buffer.network))])[0]


def gradient_norm(model: nn.Module, member: int) -> float:
    """The Euclidean norm of the gradients that the last backward pass left in a network."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        raise MixingError(
            f"member {member} has no gradients, and the rule needs their norm: call averager.step() before "
            "optimizer.zero_grad(), with members that train in their own modules"
        )
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double()))
