"""The task: loss, metric, and how networks are applied when they are scored."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import functional as F

from papa.evaluation import Apply, Loss, Metric, accuracy, call


@dataclass(frozen=True, kw_only=True)
class Task:
    """What networks are trained for; classification by default."""

    loss: Loss = F.cross_entropy
    """From outputs and targets to the mean loss of a batch."""
    metric: Metric = accuracy
    """From outputs and targets to the mean score of a batch, or an object that counts over batches; higher is best."""
    apply: Apply = call
    """How a network computes its outputs when it is scored."""
    eval_batch_size: int = 512
    """Examples per batch when scoring."""
