"""How far two checkpoints are from each other, tensor by tensor, and whether a straight line joins them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from papa.errors import SoupError
from papa.evaluation import Evaluation
from papa.files.average import Mean, check_alike, differences, is_averaged
from papa.files.evaluation_context import evaluation_context_of, load_
from papa.files.sources import Checkpoint, PathLike, open_checkpoint
from papa.repair import reset_batch_norm_

NUM_POINTS = 11
TOLERANCE = 0.1
"""How high a barrier may be in one basin, as a share of the higher end's loss."""
LEAST_LOSS = 0.1
"""A lower loss counts as this, so that noise between two losses near zero is no barrier."""


@dataclass(frozen=True)
class Difference:
    """How two tensors, or two networks, differ."""

    name: str
    numel: int
    """How many numbers it has."""
    distance: float
    """The norm of the difference."""
    relative: float
    """The same, as a share of the first's norm; infinite when that is 0 and the other's is not."""
    cosine: float
    """Of the angle between the two; NaN when one is 0."""


@dataclass(frozen=True)
class Curve:
    """Scores and losses on the straight line from one network to another."""

    positions: tuple[float, ...]
    """0 is the first network, 1 the second."""
    points: tuple[Evaluation, ...]

    @property
    def barrier(self) -> float:
        """How far the loss rises above the line between the ends' losses, at most.

        max_t  loss((1-t) A + t B) - (1-t) loss(A) - t loss(B)
        """
        first, last = self.points[0].loss, self.points[-1].loss
        heights = [
            point.loss - (1.0 - t) * first - t * last for t, point in zip(self.positions, self.points, strict=True)
        ]
        return max(math.inf if math.isnan(height) else height for height in heights)

    @property
    def allowed(self) -> float:
        """The highest barrier at which two networks still count as lying in one basin."""
        return TOLERANCE * max(self.points[0].loss, self.points[-1].loss, LEAST_LOSS)

    @property
    def in_one_basin(self) -> bool:
        """Whether the barrier is at most a tenth of the higher end's loss (or of 0.1, where both are lower)."""
        return self.barrier <= self.allowed


@dataclass(frozen=True)
class FileDiff:
    """How two checkpoints differ."""

    tensors: tuple[Difference, ...]
    """Every tensor that both have in one shape, the largest relative distance first."""
    total: Difference
    """All floating-point tensors as one."""
    unlike: tuple[str, ...]
    """Tensors that only one has, or that differ in shape or kind."""
    curve: Curve | None
    """Losses and scores between the two, where a evaluation_context was given."""

    @property
    def num_equal(self) -> int:
        """How many tensors are equal."""
        return sum(tensor.distance == 0 for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        value: dict[str, Any] = {
            "total": vars(self.total),
            "tensors": [vars(tensor) for tensor in self.tensors],
            "unlike": list(self.unlike),
        }
        if self.curve is not None:
            points = zip(self.curve.positions, self.curve.points, strict=True)
            value["curve"] = {
                "points": [{"position": t, "score": point.score, "loss": point.loss} for t, point in points],
                "barrier": self.curve.barrier,
                "allowed": self.curve.allowed,
                "in_one_basin": self.curve.in_one_basin,
            }
        return value


def diff_files(
    first: PathLike,
    second: PathLike,
    *,
    key: str | None = None,
    evaluation_context: Any = None,
    reset_batch_norm: bool = False,
) -> FileDiff:
    """Compare two checkpoints, a block at a time.

    Args:
        first: what distances are relative to; anything `papa.soup_files` takes, but a run directory.
        second: the other.
        key: where in PyTorch files the state dict is.
        evaluation_context: a network and data, for the losses between the two; as `papa.soup_files` takes it.
        reset_batch_norm: estimate BatchNorm statistics anew at every point between the two.
    """
    one, other = open_checkpoint(first, key=key), open_checkpoint(second, key=key)
    names = [
        name
        for name, info in one.tensors.items()
        if name in other.tensors and not differences({name: info}, {name: other.tensors[name]})
    ]
    left, right = Mean([one], [1.0]), Mean([other], [1.0])
    sums = {name: _sums(left, right, name) for name in names}
    tensors = [_difference(name, one.tensors[name].numel, sums[name]) for name in names]
    averaged = [name for name in names if is_averaged(one.tensors[name].dtype)]
    total = [sum(sums[name][part] for name in averaged) for part in range(4)]
    numel = sum(one.tensors[name].numel for name in averaged)
    return FileDiff(
        tensors=tuple(sorted(tensors, key=lambda tensor: (-_rank(tensor.relative), tensor.name))),
        total=_difference("all floating-point tensors", numel, total),
        unlike=tuple(differences(one.tensors, other.tensors)),
        curve=None if evaluation_context is None else _curve(one, other, evaluation_context, reset_batch_norm),
    )


def _rank(value: float) -> float:
    """NaN is the largest difference there is."""
    return math.inf if math.isnan(value) else value


def _sums(left: Mean, right: Mean, name: str) -> list[float]:
    """The sums of squares of the difference, the first and the second, and of their product, in float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    for a, b in zip(left.blocks(name), right.blocks(name), strict=True):
        # A complex number counts as two.
        a, b = (torch.view_as_real(part).flatten() if part.is_complex() else part for part in (a, b))
        a, b = a.double(), b.double()
        sums += torch.stack([torch.dot(a - b, a - b), torch.dot(a, a), torch.dot(b, b), torch.dot(a, b)])
    values: list[float] = sums.tolist()
    return values


def _difference(name: str, numel: int, sums: Sequence[float]) -> Difference:
    squared, first, second, product = sums
    distance = math.sqrt(squared) if squared >= 0 else squared
    norms = math.sqrt(first) * math.sqrt(second) if first >= 0 and second >= 0 else math.nan
    relative = distance / math.sqrt(first) if first else (math.inf if distance else 0.0)
    return Difference(name, numel, distance, relative, product / norms if norms else math.nan)


def _curve(one: Checkpoint, other: Checkpoint, evaluation_context: Any, reset_batch_norm: bool) -> Curve:
    check_alike([one, other])
    place = evaluation_context_of(evaluation_context)
    positions = tuple(index / (NUM_POINTS - 1) for index in range(NUM_POINTS))
    points = []
    for position in positions:
        load_(place.network, Mean([one, other], [1.0 - position, position]), one)
        if reset_batch_norm and 0.0 < position < 1.0:
            reset_batch_norm_(place.network, place.batches)
        points.append(place.evaluate(place.network))
        if math.isnan(points[0].loss):
            raise SoupError(f"the loss of {one.path} is not a number: a curve needs a score that returns (score, loss)")
    return Curve(positions, tuple(points))
