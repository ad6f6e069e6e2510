"""The straight line between two networks: how good is what lies on it?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from papa.align import Symmetries, align_
from papa.errors import DataError
from papa.evaluation import Apply, Batch, Loss, Metric, accuracy, call, evaluate, rereadable
from papa.repair import goals_of, layer_statistics, repair_toward_
from papa.soup import After, average_soup


@dataclass(frozen=True)
class Curve:
    """Scores and losses on the straight line between two networks."""

    coefficients: tuple[float, ...]
    """How much of the second network there is, from 0 to 1."""
    scores: tuple[float, ...]
    """The score at each, higher is better."""
    losses: tuple[float, ...]
    """The loss at each, lower is better."""

    @property
    def barrier(self) -> float:
        """How far the loss rises above the line between the losses at both ends, at most; 0 for a line without one."""
        first, last = self.losses[0], self.losses[-1]
        return max(loss - ((1 - t) * first + t * last) for t, loss in zip(self.coefficients, self.losses, strict=True))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "coefficients": list(self.coefficients),
            "score": list(self.scores),
            "loss": list(self.losses),
            "barrier": self.barrier,
        }


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

    To see the line with its units matched, align a copy of the second to the first before; with REPAIR, pass
    `after=lambda network, weights: papa.repair_(network, [first, second], inputs, weights)`.

    Args:
        first: where the line begins; not changed.
        second: where it ends, a network of the same architecture; not changed.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, or counts that add up over batches; higher is better.
        apply: how a network gives its outputs.
        num_points: how many networks are scored, both ends among them.
        after: called with each network and its two weights before it is scored, for instance to repair it.

    Returns:
        Scores and losses along the line.
    """
    return curve_of(
        lambda t: average_soup([first, second], [1 - t, t], after=after),
        batches,
        loss=loss,
        metric=metric,
        apply=apply,
        num_points=num_points,
    )


def curve_of(
    network: Callable[[float], nn.Module],
    batches: Sequence[Batch],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    apply: Apply = call,
    num_points: int = 11,
) -> Curve:
    """Score networks on a line, one after the other.

    Args:
        network: makes the network at a coefficient from 0 to 1.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, or counts that add up over batches; higher is better.
        apply: how a network gives its outputs.
        num_points: how many networks are scored, both ends among them.
    """
    if num_points < 2:
        raise DataError(f"num_points is {num_points}, expected at least 2: both ends of the line")
    batches = rereadable(batches)
    coefficients = tuple(number / (num_points - 1) for number in range(num_points))
    points = [evaluate(network(t), batches, loss=loss, metric=metric, apply=apply) for t in coefficients]
    return Curve(coefficients, tuple(point.score for point in points), tuple(point.loss for point in points))


def interpolation_curves(
    first: nn.Module,
    second: nn.Module,
    batches: Sequence[Batch],
    inputs: Sequence[Any],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    apply: Apply = call,
    num_points: int = 11,
    groups: Symmetries | None = None,
    align: bool = True,
) -> dict[str, Curve]:
    """The line between two networks four times: as it is, with units matched, with REPAIR, and with both.

    Example:
        >>> import torch
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        >>> batches = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(2)]
        >>> curves = interpolation_curves(*nets, batches, [torch.randn(32, 4)], num_points=3)
        >>> list(curves)
        ['plain', 'aligned', 'repaired', 'aligned and repaired']

    Args:
        first: where the line begins; not changed.
        second: where it ends; not changed: a copy is aligned to the first, by activations.
        batches: pairs of inputs and targets, to score on.
        inputs: batches of inputs of one shape, to align and repair by; never those scored on.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, or counts that add up over batches; higher is better.
        apply: how a network gives its outputs.
        num_points: how many networks are scored on each line.
        groups: what `symmetries` gave for this architecture, when known already.
        align: leave out the two lines with units matched when False, as for networks whose graph cannot be had.
    """
    aligned = copy.deepcopy(second)
    if align:
        align_(aligned, first, inputs, by="activations", groups=groups)

    def repair_between(end: nn.Module) -> After:
        moments = [layer_statistics(network, inputs) for network in (first, end)]

        def repair(network: nn.Module, weights: Tensor) -> None:
            repair_toward_(network, goals_of(moments, weights), inputs)

        return repair

    ends = {"": second, "aligned": aligned} if align else {"": second}
    scoring: dict[str, Any] = {"loss": loss, "metric": metric, "apply": apply, "num_points": num_points}
    plain = {name or "plain": interpolate(first, end, batches, **scoring) for name, end in ends.items()}
    repaired = {
        f"{name} and repaired" if name else "repaired": interpolate(
            first, end, batches, after=repair_between(end), **scoring
        )
        for name, end in ends.items()
    }
    return {**plain, **repaired}
