"""Scores: how good a network, a population and its ensemble are on some batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.ensemble import mean_logits
from papa.errors import DataError

Batch: TypeAlias = tuple[Tensor, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Evaluation(NamedTuple):
    """A network's score (higher is better) and loss (lower is better), means over examples."""

    score: float
    loss: float


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The percentage of examples whose highest output is the target class."""
    if outputs.dim() < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        raise DataError(
            f"accuracy got outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}, "
            "expected a score for each class and a class for each example: pass a metric of your own for other tasks"
        )
    return (outputs.argmax(dim=1) == targets).double().mean() * 100.0


def evaluate(
    model: nn.Module, batches: Iterable[Batch], *, loss: Loss = F.cross_entropy, metric: Metric = accuracy
) -> Evaluation:
    """Score and loss of one network over all examples of the batches, in evaluation mode.

    Args:
        model: left in the mode it was found in.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, higher is better.
    """
    return evaluate_together([model], batches, loss=loss, metric=metric)[0][0]


def evaluate_together(
    models: Sequence[nn.Module],
    batches: Iterable[Batch],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    gather: Callable[[list[Tensor]], list[Tensor]] = list,
) -> tuple[list[Evaluation], Evaluation]:
    """Score and loss of each network and of their ensemble, in one pass over the batches.

    Args:
        models: left in the modes they were found in.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, higher is better.
        gather: turns the outputs of the networks held here into those of all, where several processes hold them.

    Returns:
        One evaluation per network, and the ensemble's (averaged outputs).
    """
    totals: Tensor | None = None
    num_examples = 0
    with contextlib.ExitStack() as modes, torch.no_grad():
        for model in models:
            modes.enter_context(evaluating(model))
        for inputs, targets in batches:
            if not len(targets):
                continue
            outputs = torch.stack(gather([_output(model, inputs).float() for model in models]))
            values = [
                torch.stack([metric(output, targets).double(), loss(output, targets).double()])
                for output in [*outputs, mean_logits(outputs)]
            ]
            totals = torch.stack(values) * len(targets) + (0.0 if totals is None else totals)
            num_examples += len(targets)
    if totals is None:
        raise DataError("there was no batch to evaluate on: the data is empty")
    evaluations = [Evaluation(*row) for row in (totals / num_examples).tolist()]
    return evaluations[:-1], evaluations[-1]


def _output(model: nn.Module, inputs: Tensor) -> Tensor:
    output = model(inputs)
    if not isinstance(output, Tensor):
        raise DataError(
            f"{type(model).__name__} returned a {type(output).__name__}, expected a tensor: wrap the network in a "
            "module that returns its scores"
        )
    return output


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode for the block, then every submodule back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
