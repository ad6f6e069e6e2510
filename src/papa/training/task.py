"""The task that networks are trained for: its loss, its metric and how networks are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import functional as F

from papa.evaluation.classification import accuracy
from papa.evaluation.inputs import Inputs
from papa.evaluation.scores import Apply, Combine, Loss, Metric, call, mean_logits

Objective: TypeAlias = Callable[[Callable[..., Any], Inputs, Tensor], Tensor]
"""Computes the mean loss of a batch from a network, inputs and targets."""


def own_loss(outputs: Tensor, targets: Any) -> Tensor:
    """The loss that a network computes itself while training, if its `forward` takes labels and returns a `loss`.

    Otherwise, and when outputs are scored, it is the cross-entropy, of tokens if outputs have classes last.
    """
    has_classes_second = isinstance(targets, Tensor) and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    if isinstance(targets, Tensor) and not has_classes_second and outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return F.cross_entropy(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A loss and a metric, and how to compute a network's outputs for them; classification by default."""

    loss: Loss = F.cross_entropy
    """Computes the mean loss of a batch from outputs and targets; also for soft targets, if augmentation makes them.
    With `own_loss`, networks that compute their loss are left to do so."""
    objective: Objective | None = None
    """Computes the mean loss that is trained on from network, inputs and targets, such as that of a distillation; None
    for `loss`, which networks are scored by in any case."""
    metric: Metric = accuracy
    """Computes the score by which networks are compared."""
    higher_is_better: bool = True
    """Whether a higher score is better, as an accuracy is, or a lower one, as a loss."""
    combine: Combine = mean_logits
    """Computes the ensemble's outputs from those of the members: `mean_logits` or `mean_probabilities`."""
    apply: Apply = call
    """Computes a network's outputs for a batch of inputs in evaluation."""
    eval_batch_size: int = 512
    """The number of examples per batch in evaluation."""
