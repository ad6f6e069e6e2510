"""What members have in common: the similarity of their features, and the losses on the line between two of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import After, average_soup
from papa.errors import DataError, did_you_mean
from papa.evaluation.classification import accuracy
from papa.evaluation.inputs import inputs_of, num_examples, outputs_of
from papa.evaluation.scores import Apply, Batch, Evaluation, Loss, Metric, call, evaluate, evaluating, rereadable
from papa.repair.statistics import repairable_layers

Features: TypeAlias = dict[str, Tensor]
"""The output of each layer, by the layer's name: one normalised row per example."""
Gather: TypeAlias = Callable[[list[Features]], list[Features]]
"""Turns the features of the networks on this process into those of all networks."""
TOLERANCE = 0.1
"""The highest barrier within one basin, as a share of the higher loss at the ends."""
LEAST_LOSS = 0.1
"""Lower losses count as this one, so that noise between two losses near zero is no barrier."""


@torch.no_grad()
def feature_similarity(
    models: Sequence[nn.Module],
    batches: Iterable[Any],
    layers: Sequence[str] | None = None,
    *,
    gather: Gather = list,
) -> dict[str, Tensor]:
    """The cosine similarity of features between networks, for each layer.

        similarity[layer][j, k] = mean over examples of cos(features_j, features_k)

    The features of an example are all numbers of the layer's output for it. The units of independently trained
    networks have different orders, so align them first. Pass a soup as one more network to compare members with it.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> similarity = feature_similarity(nets, [torch.randn(16, 4)], layers=["1"])
        >>> similarity["1"].shape
        torch.Size([3, 3])

    Args:
        models: networks of one architecture, compared in evaluation mode and left as found.
        batches: inputs, or tuples that start with the inputs.
        layers: names of submodules; None for every convolution and linear layer.
        gather: turns the features of the networks on this process into those of all networks.

    Returns:
        A symmetric matrix in float64 for each layer, in the order of `layers`.
    """
    if not models:
        raise DataError("there is no network whose features could be compared, expected at least one")
    names = list(repairable_layers(models[0])) if layers is None else list(layers)
    for number, model in enumerate(models):
        known = dict(model.named_modules())
        for name in names:
            if name not in known:
                near = did_you_mean(name, [key for key in known if key])
                raise DataError(f"there is no layer '{name}' in network {number}: {near}")
    totals: dict[str, Tensor] = {}
    num_seen = 0
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        for batch in batches:
            inputs = inputs_of(batch)
            features = gather([_features(model, inputs, names) for model in models])
            for name in names:
                _check(name, [its[name] for its in features])
                rows = torch.stack([its[name] for its in features])
                products = torch.einsum("jnd,knd->jk", rows, rows).cpu()
                totals[name] = totals[name] + products if name in totals else products
            num_seen += num_examples(inputs)
    if not num_seen:
        raise DataError("there was no batch to compare features on: the data is empty")
    return {name: total / num_seen for name, total in totals.items()}


def _check(name: str, features: Sequence[Tensor]) -> None:
    for number, found in enumerate(features):
        if found.shape != features[0].shape:
            raise DataError(
                f"layer '{name}' has {features[0].shape[1]} outputs per example in network 0 and {found.shape[1]} in "
                f"network {number}: only networks of one architecture can be compared"
            )
        if not bool(torch.isfinite(found).all()):
            raise DataError(f"layer '{name}' of network {number} has outputs that are not finite: leave it out")


def _features(model: nn.Module, inputs: Tensor, names: Sequence[str]) -> Features:
    found: Features = {}

    def keep(name: str, output: Any) -> None:
        if not isinstance(output, Tensor) or len(output) != len(inputs):
            raise DataError(f"layer '{name}' does not return one tensor with a row per example: name another layer")
        found[name] = nn.functional.normalize(output.reshape(len(output), -1).double(), dim=1)

    with contextlib.ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hook = layer.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
            hooks.callback(hook.remove)
        outputs_of(model, inputs)
    for name in names:
        if name not in found:
            raise DataError(f"layer '{name}' did not run: name layers that the network's forward pass uses")
    return found


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
