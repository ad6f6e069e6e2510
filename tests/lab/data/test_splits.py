"""Selections of examples: balanced over classes, and the same on every run."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from papa.errors import DataError
from papa.lab.data.splits import check_labels, limit, split_classes, targets_of
from papa.training.data import Arrays, Examples, Subset

labels = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def chosen(source: object) -> list[int]:
    assert isinstance(source, Subset)
    return source.indices.tolist()


@given(labels, st.integers(1, 60))
def test_a_limit_is_as_even_as_can_be(classes: list[int], maximum: int) -> None:
    source = Arrays(torch.arange(len(classes)), torch.tensor(classes))
    few = limit(source, maximum, part="train")
    assert len(few) == min(maximum, len(classes))
    if len(few) == len(classes):
        assert few is source
        return
    assert len(set(chosen(few))) == maximum
    kept = torch.bincount(targets_of(few), minlength=5)
    available = torch.bincount(source.targets, minlength=5)
    # A class has fewer by two or more only if all its examples were taken.
    assert bool(((kept >= kept.max() - 1) | (kept == available)).all())


@given(labels)
def test_a_smaller_limit_is_part_of_a_larger_one(classes: list[int]) -> None:
    source = Arrays(torch.arange(len(classes)), torch.tensor(classes))
    sets = [set(chosen(limit(source, maximum, part="test"))) for maximum in range(1, len(classes))]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(sets))


def test_training_and_test_limits_are_drawn_apart() -> None:
    source = Arrays(torch.arange(100), torch.arange(100) % 10)
    assert chosen(limit(source, 20, part="train")) == chosen(limit(source, 20, part="train"))
    assert chosen(limit(source, 20, part="train")) != chosen(limit(source, 20, part="test"))


@given(labels, st.floats(0.05, 0.95))
def test_a_test_split_is_a_partition_and_leaves_every_class_to_train_on(classes: list[int], share: float) -> None:
    targets = torch.tensor(classes)
    counts = torch.bincount(targets)
    if not ((counts > 1) & ((counts * share).round() > 0)).any():
        with pytest.raises(DataError, match="splits no image off"):
            split_classes(targets, share)
        return
    train, test = split_classes(targets, share)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(len(classes)))
    assert set(targets[train].tolist()) == set(classes)
    tested = torch.bincount(targets[test], minlength=int(targets.max()) + 1)
    assert bool(((tested - counts * share).abs() <= 1.0).all())


def test_labels_out_of_range_raise() -> None:
    check_labels(torch.tensor([0, 9]), 10, "cifar10")
    with pytest.raises(
        DataError, match="cifar10 has labels from 0 to 10, expected them from 0 to 9 for its 10 classes"
    ):
        check_labels(torch.tensor([0, 10]), 10, "cifar10")
    with pytest.raises(DataError, match="has labels from -1 to 0"):
        check_labels(torch.tensor([0, -1]), 10, "cifar10")
    with pytest.raises(DataError, match="cifar10 has no example"):
        check_labels(torch.tensor([]), 10, "cifar10")


def test_targets_of_a_source_without_any() -> None:
    with pytest.raises(DataError, match="a Examples has no tensor `targets`"):
        targets_of(Examples([]))
