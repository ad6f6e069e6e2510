"""Sources: batches by index, parts of sources, streams of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from papa.errors import DataError
from papa.training.data import Arrays, Examples, Streaming, Subset, as_source, hold_out, stream_batches


class EchoSource:
    """A streaming source that returns what it was asked for."""

    def __len__(self) -> int:
        return 10

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return indices, indices

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for number, indices in enumerate(index_batches, start=start):
            yield indices, torch.tensor([seed, number])


def numbers(count: int) -> Arrays:
    return Arrays(torch.arange(count), torch.arange(count) % 2)


def test_streams_of_a_plain_source_are_its_batches() -> None:
    source = numbers(10)
    batches = torch.randperm(10).split(3)
    for (inputs, targets), indices in zip(stream_batches(source, batches, seed=1), batches, strict=True):
        assert torch.equal(inputs, indices)
        assert torch.equal(targets, indices % 2)


def test_subset_forwards_streams_with_its_own_indices() -> None:
    inner = Subset(EchoSource(), torch.tensor([9, 8, 7, 6, 5]))
    outer = Subset(inner, torch.tensor([4, 0, 1]))
    assert isinstance(outer, Streaming)
    results = list(stream_batches(outer, [torch.tensor([0, 2]), torch.tensor([1])], seed=7, start=3))
    assert [inputs.tolist() for inputs, _ in results] == [[5, 8], [9]]
    assert [drawn.tolist() for _, drawn in results] == [[7, 3], [7, 4]]


def test_subset_of_a_plain_source_streams_too() -> None:
    part = Subset(numbers(10), torch.tensor([9, 3]))
    assert [inputs.tolist() for inputs, _ in stream_batches(part, [torch.tensor([1, 0])], seed=1)] == [[3, 9]]


def test_streams_read_their_indices_lazily() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.tensor([0])

    assert len(next(stream_batches(Subset(numbers(3), torch.tensor([2])), endless(), seed=1))[0]) == 1


def test_hold_out_is_a_partition_that_depends_on_the_seed_only() -> None:
    train, held_out = hold_out(numbers(100), 0.02, seed=1)
    assert (len(train), len(held_out)) == (98, 2)
    both = torch.cat([part.batch(torch.arange(len(part)))[0] for part in (train, held_out)])
    assert torch.equal(both.sort().values, torch.arange(100))
    again = hold_out(numbers(100), 0.02, seed=1)[1]
    other = hold_out(numbers(100), 0.02, seed=2)[1]
    assert isinstance(held_out, Subset)
    assert isinstance(again, Subset)
    assert isinstance(other, Subset)
    assert torch.equal(held_out.indices, again.indices)
    assert not torch.equal(held_out.indices, other.indices)


@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_hold_out_raises_if_a_part_would_be_empty(share: float) -> None:
    with pytest.raises(DataError, match=r"a validation share of .* of 100 examples, expected at least one"):
        hold_out(numbers(100), share, seed=1)


def test_datasets_and_pairs_become_sources() -> None:
    examples = as_source([(torch.tensor([float(index)]), index) for index in range(4)])
    assert isinstance(examples, Examples)
    inputs, targets = examples.batch(torch.tensor([2, 1]))
    assert inputs.tolist() == [[2.0], [1.0]]
    assert targets.tolist() == [2, 1]
    with pytest.raises(DataError, match=r"data is a int, expected a pair of tensors"):
        as_source(3)
    with pytest.raises(DataError, match="data has no example"):
        as_source((torch.zeros(0, 2), torch.zeros(0)))
    with pytest.raises(DataError, match="inputs have 2 rows, targets 3"):
        Arrays(torch.zeros(2), torch.zeros(3))


def test_inputs_may_be_several_tensors_by_name() -> None:
    words, mask, targets = torch.arange(8).view(4, 2), torch.ones(4, 2), torch.arange(4)
    together = as_source(({"words": words.numpy(), "mask": mask}, targets))
    apart = as_source([({"words": words[row], "mask": mask[row]}, row) for row in range(4)])
    assert (len(together), len(apart)) == (4, 4)
    for source in (together, apart, hold_out(together, 0.5, seed=1)[0]):
        inputs, found = source.batch(torch.tensor([1, 0]))
        assert torch.equal(inputs["words"], words[found])
        assert torch.equal(inputs["mask"], mask[found])
    with pytest.raises(DataError, match="inputs have different numbers of examples: 'words' 4, 'mask' 3"):
        as_source(({"words": words, "mask": mask[:3]}, targets))
    with pytest.raises(DataError, match="a batch is a dict, expected a tensor, or tensors by name"):
        as_source(({}, targets))


class OneByOne(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [{"x": torch.zeros(2), "y": 1}] * 4,
            "an example of list is a dict of 2, expected a pair of inputs and target",
        ),
        ([(torch.zeros(2), 1, "words")] * 4, "an example of list is a tuple of 3, expected a pair"),
        (
            [({"ids": torch.zeros(2), "text": "words"}, 1)] * 4,
            "an example of list is a tuple of 2, expected a pair of inputs and target",
        ),
        (OneByOne(), "data is a OneByOne, which can only be read in its own order"),
    ],
)
def test_examples_of_another_form_raise(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_source(data).batch(torch.arange(2))
