"""Which examples belong to which part: class by class, and the same on every run."""

from __future__ import annotations

import torch
from torch import Tensor

from papa.data import Source, Subset
from papa.errors import ConfigError, DataError
from papa.streams import stream


def targets_of(source: Source) -> Tensor:
    """The class of every example, without reading an image."""
    if isinstance(source, Subset):
        return targets_of(source.source)[source.indices]
    targets = getattr(source, "targets", None)
    if not isinstance(targets, Tensor):
        raise DataError(f"a {type(source).__name__} has no tensor `targets`, expected the class of every example in it")
    return targets


def check_labels(labels: Tensor, num_classes: int, subject: str) -> None:
    """Raise a `DataError` unless every label names one of the classes."""
    if not len(labels):
        raise DataError(f"{subject} has no example, expected at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(
            f"{subject} has labels from {low} to {high}, expected them from 0 to {num_classes - 1} "
            f"for its {num_classes} classes: the data is damaged, or of another set"
        )


def limit(source: Source, maximum: int | None, *, part: str) -> Source:
    """At most `maximum` examples, drawn at random, as many of each class as can be; the same ones on every run.

    Example:
        >>> from papa.data import Arrays
        >>> few = limit(Arrays(torch.arange(8), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])), 4, part="train")
        >>> targets_of(few).sort().values
        tensor([0, 0, 1, 1])

    A smaller limit gives a part of what a larger one gives.

    Args:
        source: what to draw from; it needs `targets`.
        maximum: how many; None, or more than there are, for all.
        part: `train` or `test`; each has a stream of its own.
    """
    if maximum is None:
        return source
    if maximum < 1:
        raise ConfigError(f"max_{part} is {maximum}, expected at least 1, or None for all")
    if maximum >= len(source):
        return source
    targets = targets_of(source)
    shuffled = torch.randperm(len(source), generator=stream(0, f"limit-{part}"))
    # First the first example of every class, then the second of every class, and so on.
    turn = _place_in_class(targets[shuffled])
    return Subset(source, shuffled[turn.argsort(stable=True)[:maximum]])


def split_classes(targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Split off a share of every class for testing; the same on every run. Every class keeps one for training.

    Returns:
        The indices left for training, and those for testing, both in ascending order.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(f"test_share is {share}, expected a share between 0 and 1, such as 0.2")
    shuffled = torch.randperm(len(targets), generator=stream(0, "test-split"))
    counts = torch.bincount(targets)
    num_test = torch.minimum((counts * share).round().long(), counts - 1).clamp(min=0)
    is_test = _place_in_class(targets[shuffled]) < num_test[targets[shuffled]]
    if not is_test.any():
        raise DataError(
            f"a test share of {share} splits no image off {len(targets)} images of {len(counts)} classes, expected at "
            "least one: give a larger share, or more images"
        )
    return shuffled[~is_test].sort().values, shuffled[is_test].sort().values


def _place_in_class(labels: Tensor) -> Tensor:
    """How many examples of the same class come before each."""
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(labels)
    places[order] = torch.arange(len(labels)) - starts[labels[order]]
    return places
