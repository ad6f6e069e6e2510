"""Reproducible selections of examples, balanced over classes."""

from __future__ import annotations

import torch
from torch import Tensor

from papa.errors import DataError
from papa.streams import stream
from papa.training.data import Source, Subset


def targets_of(source: Source) -> Tensor:
    """The class labels of all examples, without reading an image."""
    if isinstance(source, Subset):
        return targets_of(source.source)[source.indices]
    targets = getattr(source, "targets", None)
    if not isinstance(targets, Tensor):
        raise DataError(f"a {type(source).__name__} has no tensor `targets`, expected the class of every example in it")
    return targets


def check_labels(labels: Tensor, num_classes: int, subject: str) -> None:
    """Raise a `DataError` unless all labels are from 0 to `num_classes - 1`."""
    if not len(labels):
        raise DataError(f"{subject} has no example, expected at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(
            f"{subject} has labels from {low} to {high}, expected them from 0 to {num_classes - 1} "
            f"for its {num_classes} classes: the data is damaged, or of another set"
        )


def limit(source: Source, maximum: int | None, *, part: str) -> Source:
    """Select at most `maximum` examples, balanced over classes; a smaller selection is part of a larger one.

    Example:
        >>> from papa.training.data import Arrays
        >>> few = limit(Arrays(torch.arange(8), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])), 4, part="train")
        >>> targets_of(few).sort().values
        tensor([0, 0, 1, 1])
    """
    if maximum is None or maximum >= len(source):
        return source
    targets = targets_of(source)
    shuffled = torch.randperm(len(source), generator=stream(0, f"limit-{part}"))
    # Take the first example of every class, then the second of every class, and so on.
    return Subset(source, shuffled[_rank_in_class(targets[shuffled]).argsort(stable=True)[:maximum]])


def split_classes(targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Split off a share of every class for testing; at least one example of each class remains for training.

    Returns the indices for training and for testing, both in ascending order.
    """
    shuffled = torch.randperm(len(targets), generator=stream(0, "test-split"))
    counts = torch.bincount(targets)
    num_test = torch.minimum((counts * share).round().long(), counts - 1).clamp(min=0)
    is_test = _rank_in_class(targets[shuffled]) < num_test[targets[shuffled]]
    if not is_test.any():
        raise DataError(
            f"a test share of {share} splits no image off {len(targets)} images of {len(counts)} classes, expected at "
            "least one: give a larger share, or more images"
        )
    return shuffled[~is_test].sort().values, shuffled[is_test].sort().values


def _rank_in_class(labels: Tensor) -> Tensor:
    """The number of earlier examples of the same class, for each example."""
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(labels)
    ranks[order] = torch.arange(len(labels)) - starts[labels[order]]
    return ranks
