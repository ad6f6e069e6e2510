"""Evaluation: the score and loss of a network, of all members and of their ensemble on some batches."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.errors import DataError
from papa.evaluation.classification import Classification, accuracy
from papa.evaluation.inputs import Inputs, logits_of, outputs_of
from papa.evaluation.inputs import num_examples as num_examples_in

Batch: TypeAlias = tuple[Inputs, Any]
"""Inputs and targets."""
Loss: TypeAlias = Callable[[Tensor, Any], Tensor]
Gather: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""Turns a list of one tensor per network on this process into one per network on any process."""
Apply: TypeAlias = Callable[[nn.Module, Inputs], Tensor]
"""Computes a network's outputs for a batch of inputs in evaluation."""
Combine: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the stacked outputs of networks, `(p, batch, ...)`, to those of their ensemble."""

CHUNK = 2**22
"""The number of outputs of each network that are gathered at a time for the ensemble."""


def mean_logits(outputs: Tensor) -> Tensor:
    """The mean of the members' logits, `(p, ...) -> (...)`, as in the paper."""
    return outputs.mean(dim=0)


def mean_probabilities(outputs: Tensor, *, dim: int = 2) -> Tensor:
    """The log of the mean of the members' class probabilities, from their stacked logits `(p, batch, classes, ...)`.

    `dim` is -1 for `(p, batch, positions, classes)`, as language models return them.
    """
    return torch.logsumexp(torch.log_softmax(outputs, dim=dim), dim=0) - math.log(len(outputs))


@runtime_checkable
class Counting(Protocol):
    """A metric that is not a mean over batches, such as F1: counts are summed over all batches, then scored."""

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The counts of one batch."""

    def score(self, counts: Tensor) -> float:
        """The score of the summed counts."""

    def details(self, counts: Tensor) -> dict[str, float]:
        """Further results by name, such as the score of each class."""


Metric: TypeAlias = Callable[[Tensor, Any], Tensor] | Counting
"""Computes the mean score of a batch from outputs and targets, or counts."""


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a network on all examples.

    Scores are compared in `papa.core.soups`.
    """

    score: float
    loss: float
    details: dict[str, float] | None = None
    """Further results of the metric, such as the score of each class."""
    losses: Tensor | None = field(default=None, compare=False, repr=False)
    """The loss of each example, if they were kept; of class probabilities at the temperature that suits them best."""


def rereadable(batches: Any) -> Any:
    """Batches that can be read more than once: an iterator becomes a list, anything else is returned unchanged."""
    return list(batches) if isinstance(batches, Iterator) else batches


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Call the network on the inputs; the default `Apply`."""
    outputs: Tensor = outputs_of(model, inputs)
    return outputs


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    apply: Apply = call,
) -> Evaluation:
    """Score and loss of one network over all examples, computed in evaluation mode.

    Args:
        model: the network; its training mode is restored afterwards.
        batches: pairs of inputs and targets.
        loss: computes the mean loss of a batch from outputs and targets.
        metric: computes the mean score of a batch from outputs and targets, or is a `Counting`.
        apply: computes the network's outputs from the network and a batch of inputs.
    """
    return evaluate_together([model], batches, loss=loss, metric=metric, apply=apply)[0][0]


def evaluate_together(
    models: Sequence[nn.Module],
    batches: Iterable[Batch],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    apply: Apply = call,
    combine: Combine = mean_logits,
    gather: Gather = list,
    ensemble_of: Sequence[int] | None = None,
    temperatures: Sequence[float] | None = None,
    keep_losses: bool = False,
) -> tuple[list[Evaluation], Evaluation]:
    """Score and loss of each network and of their ensemble, in one pass over the batches.

    `batches`, `loss`, `metric` and `apply` are as for `evaluate`. `gather` gathers one tensor per network from all
    processes; `ensemble_of` are the indices, among all these networks, of those in the ensemble; None for all.
    `temperatures` are those of each network here and of the ensemble: the details then also say how the outputs divided
    by them are scored, under names that end with `_scaled`. With `keep_losses` evaluations have the loss of each
    example.

    Returns:
        One evaluation per network of all processes, and that of the ensemble.
    """
    counting = metric if isinstance(metric, Counting) else _BatchMean(metric)
    num_examples = 0
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    scaled_counts: list[Tensor] = []
    kept: list[list[Tensor]] = []
    with contextlib.ExitStack() as modes, torch.no_grad():
        for model in models:
            modes.enter_context(evaluating(model))
        for inputs, targets in batches:
            num = num_examples_in(targets)
            if not num:
                continue
            outputs = [_output(model, inputs, apply).float() for model in models]
            outputs.append(_ensemble_output(outputs, combine, gather, ensemble_of))
            # The metric first: its errors about shapes are clearer than the loss's.
            counts = _added(counts, [counting.counts(output, targets) for output in outputs])
            if temperatures is not None:
                scaled = [output / one for output, one in zip(outputs, temperatures, strict=True)]
                scaled_counts = _added(scaled_counts, [counting.counts(output, targets) for output in scaled])
            losses = _added(losses, [checked_loss(loss(output, targets)).double() * num for output in outputs])
            if keep_losses:
                kept.append([example_losses(output, targets, loss, metric) for output in outputs])
            num_examples += num
    if not num_examples:
        raise DataError("there was no batch to evaluate on: the data is empty")
    found = []
    whole = [torch.cat(parts) for parts in zip(*kept, strict=True)]
    everyone = [[*gather(sums[:-1]), sums[-1]] if sums else [] for sums in (losses, counts, scaled_counts, whole)]
    for total, count, scaled_count, one in itertools.zip_longest(*everyone):
        details = counting.details(count)
        if scaled_count is not None:
            scaled_details = counting.details(scaled_count).items()
            details |= {f"{name}_scaled": value for name, value in scaled_details if name != "temperature"}
        best = None if one is None else one[:, one.mean(dim=0).argmin()].cpu()
        found.append(Evaluation(counting.score(count), float(total) / num_examples, details or None, best))
    return found[:-1], found[-1]


def example_losses(outputs: Tensor, targets: Any, loss: Loss, metric: Metric) -> Tensor:
    """The loss of each example, `(examples, temperatures)`; one column where there are no class probabilities.

    Targets that are no tensor have the mean loss of their batch.
    """
    if isinstance(metric, Classification):
        return metric.losses(outputs, targets)
    if not isinstance(targets, Tensor):
        return checked_loss(loss(outputs, targets)).reshape(1, 1)
    singles = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
    return torch.stack([checked_loss(loss(output, target)).reshape(1) for output, target in singles])


def _added(sums: list[Tensor], terms: list[Tensor]) -> list[Tensor]:
    return [one + other for one, other in zip(sums, terms, strict=True)] if sums else terms


def _ensemble_output(outputs: list[Tensor], combine: Combine, gather: Gather, members: Sequence[int] | None) -> Tensor:
    """The output of the ensemble of networks of all processes, gathered in chunks to bound memory."""
    # A mean of logits can be computed number by number, anything else at least needs whole examples.
    parts = [output.reshape(-1) if combine is mean_logits else output.contiguous() for output in outputs]
    num_together = max(1, CHUNK * len(parts[0]) // max(1, parts[0].numel()))
    combined = []
    for chunks in zip(*(torch.split(part, num_together) for part in parts), strict=True):
        gathered = gather(list(chunks))
        chosen = gathered if members is None else [gathered[member] for member in members]
        combined.append(combine(torch.stack(chosen)))
    return torch.cat(combined).view(outputs[0].shape)


class _BatchMean:
    """A metric that is a mean over examples, as a `Counting`: the sum of scores and the number of examples."""

    def __init__(self, metric: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._metric = metric

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean = torch.as_tensor(self._metric(outputs, targets), dtype=torch.float64)
        if mean.numel() != 1:
            raise DataError(
                f"the metric returned numbers of shape {tuple(mean.shape)}, expected one for a batch: take their mean"
            )
        num = num_examples_in(targets)
        total = mean.reshape(()) * num
        return torch.stack([total, torch.full_like(total, num)])

    def score(self, counts: Tensor) -> float:
        return float(counts[0] / counts[1])

    def details(self, counts: Tensor) -> dict[str, float]:
        return {}


def _output(model: nn.Module, inputs: Inputs, apply: Apply) -> Tensor:
    output: object = logits_of(apply(model, inputs))
    if not isinstance(output, Tensor):
        raise DataError(
            f"{type(model).__name__} returned a {type(output).__name__}, expected a tensor, or an object with logits: "
            "wrap the network in a module that returns its scores"
        )
    return output


def checked_loss(loss: Any) -> Tensor:
    """The loss of a batch, or a `DataError` if it is not one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"numbers of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise DataError(f"the loss returned {found}, expected one number for a batch: use reduction='mean'")
    return loss


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block; then restore the mode of every submodule."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
