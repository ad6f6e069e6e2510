"""The distance of two sets of weights, tensor by tensor, and the loss on the straight line between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from papa.analysis import Curve
from papa.errors import SoupError
from papa.evaluation.scores import Evaluation
from papa.files.average import average, check_same_architecture, differences, is_averaged
from papa.files.evaluation_context import evaluation_context_of, load_
from papa.files.weights import PathLike, WeightsFile, open_weights
from papa.repair import reset_batch_norm_
from papa.storage.tensors import Blocks


@dataclass(frozen=True)
class Difference:
    """How two tensors, or two networks, differ."""

    name: str
    numel: int
    """The number of elements."""
    distance: float
    """The norm of the difference."""
    relative: float
    """The distance as a share of the first norm; infinite if only that is 0."""
    cosine: float
    """The cosine of the angle between the two; NaN if one is 0."""


@dataclass(frozen=True)
class FileDiff:
    """How two files of weights differ."""

    tensors: tuple[Difference, ...]
    """Every tensor that both have with the same shape, the largest relative distance first."""
    total: Difference
    """All floating-point tensors as one."""
    unlike: tuple[str, ...]
    """Tensors that only one has, or that differ in shape or kind."""
    curve: Curve | None
    """Losses and scores between the two, if an evaluation context was given."""

    @property
    def num_equal(self) -> int:
        """The number of equal tensors."""
        return sum(tensor.distance == 0 for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        value: dict[str, Any] = {
            "total": vars(self.total),
            "tensors": [vars(tensor) for tensor in self.tensors],
            "unlike": list(self.unlike),
        }
        if self.curve is not None:
            points = zip(self.curve.coefficients, self.curve.scores, self.curve.losses, strict=True)
            value["curve"] = {
                "points": [{"position": t, "score": score, "loss": loss} for t, score, loss in points],
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
    """Compare two files of weights, block by block.

    Args:
        first: distances are relative to this one; anything `papa.soup_files` takes, except a run directory.
        second: the other.
        key: the place of the state dict in PyTorch files.
        evaluation_context: a network and data, for the losses between the two; as for `papa.soup_files`.
        reset_batch_norm: estimate BatchNorm statistics again at every point between the two.
    """
    one, other = open_weights(first, key=key), open_weights(second, key=key)
    names = [
        name
        for name, info in one.tensors.items()
        if name in other.tensors and not differences({name: info}, {name: other.tensors[name]})
    ]
    left, right = average([one], [1.0]), average([other], [1.0])
    sums = {name: _sums(left, right, name) for name in names}
    tensors = [_difference(name, one.tensors[name].numel, sums[name]) for name in names]
    averaged = [name for name in names if is_averaged(one.tensors[name].dtype)]
    total = [sum(sums[name][part] for name in averaged) for part in range(4)]
    numel = sum(one.tensors[name].numel for name in averaged)
    return FileDiff(
        # NaN counts as the largest difference.
        tensors=tuple(sorted(tensors, key=lambda one: (not math.isnan(one.relative), -one.relative, one.name))),
        total=_difference("all floating-point tensors", numel, total),
        unlike=tuple(differences(one.tensors, other.tensors)),
        curve=None if evaluation_context is None else _curve(one, other, evaluation_context, reset_batch_norm),
    )


def _sums(left: Blocks, right: Blocks, name: str) -> list[float]:
    """The sums of squares of the difference, the first and the second, and the sum of their product, in float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    for a, b in zip(left(name), right(name), strict=True):
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


def _curve(one: WeightsFile, other: WeightsFile, evaluation_context: Any, reset_batch_norm: bool) -> Curve:
    check_same_architecture([one, other])
    context = evaluation_context_of(evaluation_context)

    def evaluate(position: float) -> Evaluation:
        load_(context.network, average([one, other], [1.0 - position, position]), one)
        if reset_batch_norm and 0.0 < position < 1.0:
            reset_batch_norm_(context.network, context.batches)
        found = context.evaluate(context.network)
        if position == 0.0 and math.isnan(found.loss):
            raise SoupError(f"the loss of {one.path} is not a number: a curve needs a score that returns (score, loss)")
        return found

    return Curve.of(evaluate)
