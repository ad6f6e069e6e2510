"""Sources: data that hands out a whole batch at a time, by index.

Who draws which examples is decided elsewhere (`training`, from each member's own stream); a source only answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from papa.errors import DataError
from papa.inputs import Inputs, are_inputs, each, num_examples, parts_of
from papa.streams import stream


@runtime_checkable
class Source(Protocol):
    """Anything that knows how many examples it has and hands out any of them as a batch."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the examples at these indices."""
        ...


@runtime_checkable
class Streaming(Source, Protocol):
    """A source that augments while it reads, and so hands out training batches better than one at a time."""

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Augmented inputs and targets for one batch of indices after the other; see `stream_batches`."""
        ...


class Arrays:
    """Examples in memory: inputs and targets as tensors or arrays of one length; inputs may be several, by name."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs: Inputs = each(inputs, torch.as_tensor)
        self.targets = torch.as_tensor(targets)
        if num_examples(self.inputs) != len(self.targets):
            raise DataError(
                f"inputs have {num_examples(self.inputs)} rows, targets {len(self.targets)}: every example needs both"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """One gather for each tensor."""

        def rows(part: Tensor) -> Tensor:
            return part.index_select(0, indices.to(part.device))

        return each(self.inputs, rows), rows(self.targets)


class Examples:
    """A `torch.utils.data.Dataset`, read one example at a time and collated."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """As many `dataset[i]` as there are indices."""
        found = default_collate([self.dataset[index] for index in indices.tolist()])
        is_pair = isinstance(found, (tuple, list)) and len(found) == 2
        if not is_pair or not are_inputs(found[0]) or not isinstance(found[1], Tensor):
            example = self.dataset[int(indices[0])]
            parts = f" of {len(example)}" if isinstance(example, (tuple, list, dict)) else ""
            raise DataError(
                f"an example of {type(self.dataset).__name__} is a {type(example).__name__}{parts}, expected a pair of "
                "inputs and target: each a tensor or a number, or the inputs tensors by name; wrap the dataset in one "
                "that gives such pairs"
            )
        inputs, targets = found
        return inputs, targets


class Subset:
    """Some of the examples of another source."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """The source's examples behind these indices."""
        return self.source.batch(self.indices[indices])

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """The source's own training batches behind these indices."""
        return stream_batches(self.source, (self.indices[indices] for indices in index_batches), seed=seed, start=start)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a network is trained, chosen and tested on."""

    train: Source
    """What members train on."""
    validation: Source
    """Held out from training, for greedy soups; never augmented."""
    test: Source | None = None
    """Looked at once, at the end."""


def as_source(data: Any) -> Source:
    """A pair of arrays, a torch dataset or a source, as a source.

    Example:
        >>> len(as_source((torch.zeros(8, 4), torch.zeros(8))))
        8
    """
    if (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and all(isinstance(part, (Tensor, np.ndarray)) for part in [*parts_of(data[0]), data[1]])
    ):
        source: Source = Arrays(*data)
    elif isinstance(data, Source):
        source = data
    elif isinstance(data, (tuple, dict)) and _are_arrays(data):
        raise DataError(
            f"data is a {type(data).__name__} of {len(data)}, expected a pair of tensors (inputs, targets). Several "
            "inputs go by name, ({'words': ..., 'mask': ...}, targets); training, validation and test data into a "
            "papa.data.Data"
        )
    elif isinstance(data, IterableDataset):
        raise DataError(
            f"data is a {type(data).__name__}, which can only be read in its own order: members need an order each, so "
            "give a dataset with __len__ and __getitem__"
        )
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = Examples(data)
    else:
        raise DataError(
            f"data is a {type(data).__name__}, expected a pair of tensors (inputs, targets; inputs may be tensors by "
            "name), a torch dataset, or an object with __len__ and batch(indices)"
        )
    if len(source) == 0:
        raise DataError("data has no example, expected at least one")
    return source


def _are_arrays(data: Any) -> bool:
    """Whether what should be examples is a few arrays of many, or pairs of such."""
    found = list(data.values()) if isinstance(data, dict) else list(data)
    parts = [part for one in found for part in (one if isinstance(one, (tuple, list)) else [one])]
    return 0 < len(found) <= 3 and all(isinstance(part, (Tensor, np.ndarray)) and part.ndim > 0 for part in parts)


def hold_out(source: Source, share: float, *, seed: int) -> tuple[Source, Source]:
    """Split off a share for validation: the same examples for all members and methods of a seed.

    Returns:
        What is left for training, and what is held out.
    """
    num_held_out = round(len(source) * share)
    if not 0 < num_held_out < len(source):
        raise DataError(
            f"a validation share of {share} holds out {num_held_out} of {len(source)} examples, expected at least one "
            "for validation and one for training"
        )
    order = torch.randperm(len(source), generator=stream(seed, "split"), device="cpu")
    return Subset(source, order[num_held_out:]), Subset(source, order[:num_held_out])


def batches_of(source: Source, batch_size: int) -> Iterator[tuple[Inputs, Tensor]]:
    """All examples in their own order, the last batch as small as need be."""
    for indices in torch.split(torch.arange(len(source), device="cpu"), batch_size):
        yield source.batch(indices)


def stream_batches(
    source: Source, index_batches: Iterable[Tensor], *, seed: int, start: int = 0
) -> Iterator[tuple[Inputs, Tensor]]:
    """Training batches, one after the other: by the source's own `stream` when it has one, else by its `batch`.

    Example:
        >>> source = Arrays(torch.arange(6), torch.zeros(6))
        >>> [inputs.tolist() for inputs, _ in stream_batches(source, torch.tensor([[5, 0], [2, 1]]), seed=1)]
        [[5, 0], [2, 1]]

    A streaming source reads ahead and augments: what it draws for batch `n` is a function of `seed` and `n` only.

    Args:
        source: where the examples come from.
        index_batches: the indices of each batch; read lazily, a few batches ahead.
        seed: of what the source draws, if it draws anything.
        start: the number of the first batch, for a stream that goes on where another was stopped.
    """
    if isinstance(source, Streaming):
        return source.stream(index_batches, seed=seed, start=start)
    return (source.batch(indices) for indices in index_batches)


def as_data(data: Any, validation: float, *, seed: int) -> Data:
    """Whatever the user gave as data, with a share split off for validation unless there is validation data."""
    if isinstance(data, Data):
        test = None if data.test is None else as_source(data.test)
        return Data(train=as_source(data.train), validation=as_source(data.validation), test=test)
    train, held_out = hold_out(as_source(data), validation, seed=seed)
    return Data(train=train, validation=held_out)
