"""Scores: how good a network, a population and its ensemble are on some batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.ensemble import mean_logits
from papa.errors import DataError
from papa.inputs import Inputs, outputs_of

Batch: TypeAlias = tuple[Inputs, Tensor]
"""Inputs and targets."""
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Gather: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""Turns one tensor per network held here into one per network held anywhere."""
Apply: TypeAlias = Callable[[nn.Module, Inputs], Tensor]
"""How a network gives its outputs for a batch of inputs in evaluation."""

CHUNK = 2**22
"""How many outputs of each network are brought together at a time for the ensemble."""


@runtime_checkable
class Counting(Protocol):
    """A metric of a whole data set that is no mean over batches: it is computed from counts that add up."""

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What one batch adds."""
        ...

    def score(self, counts: Tensor) -> float:
        """The score, higher is better."""
        ...

    def details(self, counts: Tensor) -> dict[str, float]:
        """What else the counts tell, by name."""
        ...


Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor] | Counting
"""The mean score of a batch, or counts of all batches; higher is better."""


class Evaluation(NamedTuple):
    """A network's score (higher is better) and loss (lower is better), means over examples."""

    score: float
    loss: float
    details: dict[str, float] | None = None
    """What else the metric tells, such as the score of each class."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The percentage of examples whose highest output is the target class."""
    is_whole = not (targets.is_floating_point() or targets.is_complex())
    if outputs.dim() < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape or not is_whole:
        raise DataError(
            f"accuracy got outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}, "
            f"{targets.dtype}; expected a score for each class and a class for each example: pass a metric of your own "
            "for other tasks"
        )
    return (outputs.argmax(dim=1) == targets).double().mean() * 100.0


def rereadable(batches: Any) -> Any:
    """Batches that are read more than once: as they are, or kept in memory where they can only be read once."""
    return list(batches) if isinstance(batches, Iterator) else batches


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """The network's outputs for the inputs as they are."""
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
    """Score and loss of one network over all examples of the batches, in evaluation mode.

    Args:
        model: left in the mode it was found in.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, or counts that add up over batches; higher is better.
        apply: how the network gives its outputs.
    """
    return evaluate_together([model], batches, loss=loss, metric=metric, apply=apply)[0][0]


def evaluate_together(
    models: Sequence[nn.Module],
    batches: Iterable[Batch],
    *,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    apply: Apply = call,
    gather: Gather = list,
    ensemble_of: Sequence[int] | None = None,
) -> tuple[list[Evaluation], Evaluation]:
    """Score and loss of each network and of their ensemble, in one pass over the batches.

    Args:
        models: left in the modes they were found in.
        batches: pairs of inputs and targets.
        loss: the mean loss of a batch.
        metric: the mean score of a batch, or counts that add up over batches; higher is better.
        apply: how a network gives its outputs.
        gather: turns one tensor per network held here into one per network of all, where several processes hold them.
        ensemble_of: which of all networks the ensemble is made of; None for all.

    Returns:
        One evaluation per network, and the ensemble's (averaged outputs).
    """
    counting = metric if isinstance(metric, Counting) else _MeanOf(metric)
    tallies: list[_Tally] = [_Tally(counting, loss) for _ in models]
    ensemble = _Tally(counting, loss)
    with contextlib.ExitStack() as modes, torch.no_grad():
        for model in models:
            modes.enter_context(evaluating(model))
        for inputs, targets in batches:
            if not len(targets):
                continue
            outputs = [_output(model, inputs, apply).float() for model in models]
            for tally, output in zip(tallies, outputs, strict=True):
                tally.add(output, targets)
            ensemble.add(mean_of_all(outputs, gather, ensemble_of), targets)
    if not ensemble.num_examples:
        raise DataError("there was no batch to evaluate on: the data is empty")
    losses = gather([tally.total_loss for tally in tallies])
    counts = gather([tally.total_counts for tally in tallies])
    each = [ensemble.evaluation(*pair) for pair in zip(losses, counts, strict=True)]
    return each, ensemble.evaluation(ensemble.total_loss, ensemble.total_counts)


def mean_of_all(outputs: list[Tensor], gather: Gather, members: Sequence[int] | None = None) -> Tensor:
    """The mean over all networks of their outputs, a bounded piece at a time: whole images of all may be too many."""
    pieces = zip(*(torch.split(output.reshape(-1), CHUNK) for output in outputs), strict=True)
    everyone = (gather(list(piece)) for piece in pieces)
    counted = (all_of if members is None else [all_of[member] for member in members] for all_of in everyone)
    means = [mean_logits(torch.stack(some)) for some in counted]
    return torch.cat(means).view(outputs[0].shape)


class _Tally:
    """Sums over batches, of one network or of the ensemble."""

    def __init__(self, metric: Counting, loss: Loss) -> None:
        self.metric, self.loss = metric, loss
        self.num_examples = 0
        self.total_loss = self.total_counts = torch.zeros((), dtype=torch.float64)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        counts = self.metric.counts(outputs, targets)
        loss = self.loss(outputs, targets).double() * len(targets)
        is_first = self.num_examples == 0
        self.total_counts = counts if is_first else self.total_counts + counts
        self.total_loss = loss if is_first else self.total_loss + loss
        self.num_examples += len(targets)

    def evaluation(self, total_loss: Tensor, counts: Tensor) -> Evaluation:
        details = self.metric.details(counts)
        return Evaluation(self.metric.score(counts), float(total_loss) / self.num_examples, details or None)


class _MeanOf:
    """A mean score of batches as counts: the sum over examples, and their number."""

    def __init__(self, metric: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.metric = metric

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = torch.as_tensor(self.metric(outputs, targets), dtype=torch.float64)
        if found.numel() != 1:
            raise DataError(
                f"the metric returned numbers of shape {tuple(found.shape)}, expected one for a batch: take their mean"
            )
        total = found.reshape(()) * len(targets)
        return torch.stack([total, torch.full_like(total, len(targets))])

    def score(self, counts: Tensor) -> float:
        return float(counts[0] / counts[1])

    def details(self, counts: Tensor) -> dict[str, float]:
        return {}


def _output(model: nn.Module, inputs: Inputs, apply: Apply) -> Tensor:
    output: object = apply(model, inputs)
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
