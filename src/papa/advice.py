"""Whether members are too far apart, nearly one network, or neither: advice about the strength of averaging."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import mean_network
from papa.couplings.observation import Probe
from papa.errors import DataError
from papa.evaluation.inputs import outputs_of
from papa.evaluation.scores import Loss, evaluating

NEARLY_ONE = 0.001
"""Members whose distance to the mean is below this share of its norm are nearly one network."""
ADVICE_FROM = 0.25
"""The share of training from which on scores lead to advice: members that start apart need time to come together."""
TOO_FAR = "the average is worse than its members: push more strongly"
TOO_CLOSE = "members are nearly one network: push less"
GOOD = "the average is better than its members, and these differ: keep the strength"


@dataclass(frozen=True)
class Diagnosis:
    """The average against its members, on the same data."""

    member_losses: tuple[float, ...]
    """The mean loss of each active member."""
    average_loss: float
    """The mean loss of their average."""
    spread: float
    """The members' root mean square distance to the mean, as a share of its norm."""

    @property
    def member_loss(self) -> float:
        """The mean of `member_losses`."""
        return fmean(self.member_losses)

    @property
    def advice(self) -> str:
        """What to do about the strength, in words."""
        if not self.average_loss <= self.member_loss:
            return TOO_FAR
        return TOO_CLOSE if self.spread < NEARLY_ONE else GOOD

    def __str__(self) -> str:
        return (
            f"loss of the average {self.average_loss:.4g}, of its members {self.member_loss:.4g}; distance to the mean "
            f"{self.spread:.2%} of its norm: {self.advice}"
        )


def advice_from_scores(
    members: Sequence[float], average: float, *, spread: float | None = None, higher_is_better: bool = True
) -> str | None:
    """What to do about the strength, from scores on the same data; None if nothing is wrong.

    Scores of few examples are noisy, so the average counts as worse only if it is worse than every member. The scores
    of dropped members are NaN; `spread` is that of `Diagnosis`, if it is known.

    Example:
        >>> advice_from_scores([91.0, 90.5], 72.0)
        'the average is worse than its members: push more strongly'
    """
    sign = 1.0 if higher_is_better else -1.0
    scores = [sign * score for score in members if not math.isnan(score)]
    if len(scores) < 2:
        return None
    if not sign * average >= min(scores):
        return TOO_FAR
    return TOO_CLOSE if spread is not None and spread < NEARLY_ONE else None


def loss_probe(batches: Sequence[Any] | Callable[[], Iterable[Any]], loss: Loss) -> Probe:
    """A function from a network to its mean loss on some batches, in evaluation mode and without gradients.

    Example:
        >>> batch = torch.randn(8, 4), torch.randint(2, (8,))
        >>> probe = loss_probe([batch], nn.functional.cross_entropy)
        >>> probe(nn.Linear(4, 2)) > 0
        True

    Args:
        batches: pairs of inputs and targets, or a function that gives them: the same ones for all networks of a step.
        loss: from outputs and targets to the mean loss.
    """

    def probe(network: nn.Module) -> float:
        found = batches() if callable(batches) else batches
        with evaluating(network), torch.no_grad():
            losses = [float(loss(outputs_of(network, inputs), targets)) for inputs, targets in found]
        if not losses:
            raise DataError("a loss needs at least one batch, got none")
        return fmean(losses)

    return probe


def diagnose(population: Population, batches: Iterable[Any], loss: Loss) -> Diagnosis:
    """Compare the average of a population with its members, and say whether to push more strongly or less.

    Example:
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> batch = torch.randn(8, 4), torch.randint(2, (8,))
        >>> print(diagnose(population, [batch], nn.functional.cross_entropy))
        loss of the average ...

    Networks are in evaluation mode. If several processes hold the population, all must call it.

    Args:
        population: the members.
        batches: a few pairs of inputs and targets, of validation data, or of training data without augmentation.
        loss: from outputs and targets to the mean loss.
    """
    probe, active = loss_probe(list(batches), loss), population.active
    mine = zip(population.members, population, strict=True)
    losses = gather_or_raise(
        population.group, lambda: [probe(net) if member in active else math.nan for member, net in mine]
    )
    mean = mean_network(population)
    mean.fill_(soup_row(population.size, active))
    average_loss = gather_or_raise(population.group, lambda: [probe(mean.network)])[0]
    distances = population.distances()[list(active)]
    return Diagnosis(tuple(losses[member] for member in active), average_loss, spread_of(distances, mean.network))


def spread_of(distances: Tensor, mean: nn.Module) -> float:
    """The root mean square of the members' distances to the mean, as a share of the norm of the mean's parameters."""
    norm = math.sqrt(sum(float(parameter.detach().double().square().sum()) for parameter in mean.parameters()))
    return float(distances.double().square().mean().sqrt()) / norm if norm else 0.0
