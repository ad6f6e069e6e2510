"""What a task is: a loss, a metric, and a way to apply a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.nn import functional as F

from papa.errors import ConfigError
from papa.evaluation import Apply, Loss, Metric, accuracy, call
from papa.lab.tasks.apply import apply_in_windows, apply_whole
from papa.lab.tasks.segmentation import F1, pixel_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Task:
    """What networks are trained for."""

    loss: Loss
    """The mean loss of a batch, for hard targets and for soft ones."""
    metric: Metric
    """What networks are compared by, higher is better."""
    apply: Apply = call
    """How a network gives its outputs in evaluation."""
    eval_batch_size: int = 512
    """How many examples are evaluated at once."""


def classification() -> Task:
    """One class for each image: cross entropy, and accuracy in percent."""
    return Task(loss=F.cross_entropy, metric=accuracy)


def segmentation(classes: Sequence[str], *, ignore: int = 255, window: int | None = None, overlap: int = 64) -> Task:
    """One class for each pixel: cross entropy, and the F1 of each class, averaged over classes, in percent.

    Example:
        >>> task = segmentation(["road", "tree"], window=512)
        >>> task.eval_batch_size
        1

    Args:
        classes: their names, in the order of their labels.
        ignore: the label of pixels that have no class; they count nowhere.
        window: apply networks to overlapping windows of this side; None for whole images at once, one at a time.
        overlap: how many pixels neighbouring windows share.
    """
    if window is not None and not 0 <= overlap < window:
        raise ConfigError(f"the overlap of windows is {overlap}, expected 0 to below the window's side of {window}")
    apply = apply_whole if window is None else partial(apply_in_windows, window=window, overlap=overlap)
    return Task(
        loss=partial(pixel_cross_entropy, ignore=ignore),
        metric=F1(classes, ignore=ignore),
        apply=apply,
        eval_batch_size=1,
    )
