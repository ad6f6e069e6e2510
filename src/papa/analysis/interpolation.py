"""Linear interpolation between two networks, and the loss barrier between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from papa.align import Symmetries, align_
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import After, average_soup
from papa.errors import DataError
from papa.evaluation.classification import accuracy
from papa.evaluation.scores import Apply, Batch, Evaluation, Loss, Metric, call, evaluate, rereadable
from papa.repair import repair_toward_members

TOLERANCE = 0.1
"""The highest barrier within one basin, as a share of the higher loss at the ends."""
LEAST_LOSS = 0.1
"""Lower losses count as this one, so that noise between two losses near zero is no barrier."""


@dataclass(frozen=True)
class Curve:
    """Scores and losses of the networks on a straight line between two networks."""

    coefficients: tuple[float, ...]
    """The weight of the second network, from 0 to 1."""
    scores: tuple[float, ...]
    """The score at each coefficient."""
    losses: tuple[float, ...]
    """The loss at each coefficient, lower is better."""

    @property
    def barrier(self) -> float:
        """The largest rise of the loss above the line between the losses at both ends; 0 if it never rises.

        max_t  loss(t) - ((1 - t) loss(0) + t loss(1)),   infinite if a loss is NaN
        """
        first, last = self.losses[0], self.losses[-1]
        line = [(1 - t) * first + t * last for t in self.coefficients]
        rises = [loss - below for loss, below in zip(self.losses, line, strict=True)]
        return max(math.inf if math.isnan(rise) else rise for rise in rises)

    @property
    def allowed(self) -> float:
        """The highest barrier of networks in one basin."""
        return TOLERANCE * max(self.losses[0], self.losses[-1], LEAST_LOSS)

    @property
    def in_one_basin(self) -> bool:
        """Whether the barrier is at most a tenth of the higher loss at the ends (or of 0.1, if both are lower)."""
        return self.barrier <= self.allowed

    @staticmethod
    def of(evaluate: Callable[[float], Evaluation], num_points: int = 11) -> Curve:
        """The curve from the evaluation of the network at each coefficient."""
        coefficients = tuple(number / (num_points - 1) for number in range(num_points))
        points = [evaluate(t) for t in coefficients]
        return Curve(coefficients, tuple(point.score for point in points), tuple(point.loss for point in points))

    def to_json(self) -> dict[str, Any]:
        """The curve as plain values."""
        return {
            "coefficients": list(self.coefficients),
            "score": list(self.scores),
            "loss": list(self.losses),
            "barrier": self.barrier,
        }


def curve_between(
    members: Population | Sequence[nn.Module],
    pair: tuple[int, int],
    batches: Sequence[Batch],
    *,
    num_points: int = 11,
    after: After | None = None,
    **scoring: Any,
) -> Curve:
    """Score the networks on the straight line between two members of a population or list; see `interpolate`."""
    if num_points < 2:
        raise DataError(f"num_points is {num_points}, expected at least 2: both ends of the line")
    batches = rereadable(batches)
    size = members.size if isinstance(members, Population) else len(members)
    first, second = (soup_row(size, [member]) for member in pair)

    def evaluate_at(t: float) -> Evaluation:
        network = average_soup(members, (1 - t) * first + t * second, after=after)
        return evaluate(network, batches, **scoring)

    return Curve.of(evaluate_at, num_points)


def interpolate(
    first: nn.Module,
    second: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    apply: Apply = call,
    num_points: int = 11,
    after: After | None = None,
) -> Curve:
    """Score the networks on the straight line between two.

        network(t) = (1 - t) first + t second,   t = 0, ..., 1

    Example:
        >>> import torch
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        >>> batches = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(2)]
        >>> curve = interpolate(*nets, batches, num_points=5)
        >>> curve.coefficients
        (0.0, 0.25, 0.5, 0.75, 1.0)
        >>> curve.barrier >= 0
        True

    To match units first, align a copy of the second network to the first. For REPAIR, pass
    `after=lambda network, weights: papa.repair_(network, [first, second], inputs, weights)`.

    Args:
        first: the network at t = 0, unchanged.
        second: the network at t = 1, of the same architecture, unchanged.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, or counts that add up over batches.
        apply: computes a network's outputs.
        num_points: the number of networks to score, both ends included.
        after: called with each network and its two weights before it is scored, for instance to repair it.
    """
    scoring: dict[str, Any] = {"loss": loss, "metric": metric, "apply": apply}
    return curve_between([first, second], (0, 1), batches, num_points=num_points, after=after, **scoring)


def interpolation_curves(
    first: nn.Module,
    second: nn.Module,
    batches: Sequence[Batch],
    inputs: Sequence[Any],
    *,
    symmetries: Symmetries | None = None,
    align: bool = True,
    **scoring: Any,
) -> dict[str, Curve]:
    """The line between two networks, four times: plain, with units matched, with REPAIR, and with both.

    Example:
        >>> import torch
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        >>> batches = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(2)]
        >>> curves = interpolation_curves(*nets, batches, [torch.randn(32, 4)], num_points=3)
        >>> list(curves)
        ['plain', 'aligned', 'repaired', 'aligned and repaired']

    Args:
        first: the network at one end, unchanged.
        second: the network at the other end, unchanged; a copy is aligned to the first, by activations.
        batches: pairs of inputs and targets, to score on.
        inputs: batches of inputs of one shape, to align and repair with; never those scored on.
        symmetries: the result of `papa.symmetries` for this architecture; None to derive them.
        align: False to leave out the two lines with units matched, as for networks that cannot be exported.
        scoring: `loss`, `metric`, `apply` and `num_points`, as for `interpolate`.
    """
    ends = {"": second}
    if align:
        ends["aligned"] = copy.deepcopy(second)
        align_(ends["aligned"], first, inputs, by="activations", symmetries=symmetries)

    plain = {name or "plain": interpolate(first, end, batches, **scoring) for name, end in ends.items()}
    repaired = {}
    for name, end in ends.items():
        repair = repair_toward_members([first, end], (0, 1), inputs)
        repaired[f"{name} and repaired" if name else "repaired"] = interpolate(
            first, end, batches, after=repair, **scoring
        )
    return {**plain, **repaired}
