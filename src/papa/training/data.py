"""Data for training and evaluation: like a map-style torch `Dataset`, but read one batch of indices at a time.

Pass `papa.train` a pair of tensors, any `Dataset` or `DataLoader`, or a `Source`. Every member draws its own order of
indices, and a source only returns the examples at the indices it is given. A loader with a sampler of its own, or of
an iterable dataset, gives whole batches instead (`LoaderBatches`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from papa.errors import ConfigError, DataError
from papa.evaluation.inputs import Inputs, as_batch, each, num_examples, tensors_in
from papa.streams import derive, global_stream, seed_global_, stream


@runtime_checkable
class Source(Protocol):
    """A data set of examples: a `Dataset` that returns several examples at once, already collated."""

    def __len__(self) -> int:
        """The number of examples."""

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the examples at these indices."""


@runtime_checkable
class Streaming(Source, Protocol):
    """A source with a faster or augmented way to read a sequence of training batches, such as decoding ahead."""

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and targets for each batch of indices in turn; see `stream_batches`."""


class Arrays:
    """Examples in memory, as a `TensorDataset` holds them: tensors or arrays of inputs and targets of equal length.

    Inputs and targets may also be mappings from names to tensors, and inputs a tuple.
    """

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs: Inputs = each(inputs, torch.as_tensor)
        self.targets: Any = each(targets, torch.as_tensor)
        if num_examples(self.inputs) != num_examples(self.targets):
            raise DataError(
                f"inputs have {num_examples(self.inputs)} rows, targets {num_examples(self.targets)}: every example "
                "needs both"
            )

    def __len__(self) -> int:
        return num_examples(self.targets)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """One `index_select` per tensor."""

        def rows(part: Tensor) -> Tensor:
            return part.index_select(0, indices.to(part.device))

        return each(self.inputs, rows), each(self.targets, rows)


class Examples:
    """A map-style `torch.utils.data.Dataset`, read one example at a time.

    `options` are those of the `DataLoader` that reads training batches, such as `num_workers`; without workers there is
    none.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.dataset, self.collate, self.options = dataset, collate, dict(options or {})

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """`dataset[i]` for each index, collated."""
        return self._checked(self.collate([self.dataset[index] for index in indices.tolist()]))

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Inputs, Any]]:
        """Training batches, read ahead by workers if there are any."""
        if not self.options.get("num_workers"):
            return (self.batch(indices) for indices in index_batches)
        loader = DataLoader(
            self.dataset,
            batch_sampler=[indices.tolist() for indices in index_batches],
            collate_fn=self.collate,
            generator=torch.Generator().manual_seed(derive(seed, "workers", position=start)),
            **self.options,
        )
        return (self._checked(found) for found in loader)

    def _checked(self, found: Any) -> tuple[Inputs, Any]:
        return as_batch(found, type(self.dataset).__name__)


FIXED_SEED = 666
"""The paper's: REPAIR uses the same data on every call, whatever the run's seed."""


class ByIndex:
    """Reads a source by index, `batch_size` examples at a time, each member in an order of its own."""

    decides_order = False
    """Whether the data decides on its batches, instead of the member that reads it."""

    def __init__(self, source: Source, batch_size: int) -> None:
        self.source, self.batch_size = source, batch_size

    def __len__(self) -> int:
        return len(self.source) // self.batch_size

    def limited(self, num_batches: int) -> Source:
        """The same data, of which at most so many batches are read in an epoch."""
        raise ConfigError(
            "steps_per_epoch is for loaders with a sampler of their own or an iterable dataset: the length of other "
            "data is known"
        )

    def check_step(self, accumulate: int) -> None:
        """Raise a `DataError` unless there is enough data for one optimizer step."""
        if accumulate <= len(self):
            return
        found = f"batch_size is {self.batch_size}"
        if accumulate > 1:
            found += f" and accumulate {accumulate}, which makes {accumulate * self.batch_size} examples per step"
        raise DataError(f"{found}, expected at most the {len(self.source)} training examples")

    def order(self, seed: int, member: int, epoch: int) -> Tensor:
        """The indices of a member's training examples in an epoch, in order."""
        return torch.randperm(len(self.source), generator=stream(seed, "order", member, epoch), device="cpu")

    def training(self, seed: int, member: int, epoch: int, start: int = 0) -> Iterator[tuple[Inputs, Any]]:
        """A member's training batches of an epoch, from number `start` on."""
        return stream_batches(
            self.source,
            torch.split(self.order(seed, member, epoch)[start * self.batch_size :], self.batch_size),
            seed=derive(seed, "decode", member, epoch),
            start=start,
        )

    def fixed(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        """Batches that are the same on every call, for REPAIR and alignment."""
        order = torch.randperm(len(self.source), generator=stream(FIXED_SEED, "repair"), device="cpu")
        return self._read(order[: len(self) * self.batch_size], seed, "repair")

    def every(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        """All examples, to score networks."""
        return self._read(torch.arange(len(self.source), device="cpu"), seed, "evaluate")

    def _read(self, indices: Tensor, seed: int, purpose: str) -> Iterator[tuple[Inputs, Any]]:
        for number, part in enumerate(torch.split(indices, self.batch_size)):
            with global_stream(seed, purpose, position=number):  # for datasets with random transforms
                batch = self.source.batch(part)
            yield batch

    def few(self, number: int, generator: torch.Generator | None = None) -> Source:
        """The first examples, or random ones; one batch if the data decides on its batches."""
        size = len(self.source)
        if generator is None:
            return Subset(self.source, torch.arange(min(number, size), device="cpu"))
        return Subset(self.source, torch.randint(size, (number,), generator=generator, device="cpu"))


class LoaderBatches:
    """The batches of a `DataLoader` with a sampler of its own or an iterable dataset, drawn again for each member.

    Its random numbers are a function of the seed that `epoch` is given. At most `limit` batches of an epoch are read.
    """

    decides_order = True

    def __init__(self, loader: DataLoader[Any], limit: int | None = None) -> None:
        self.loader, self.limit = loader, limit

    def limited(self, num_batches: int) -> Source:
        return LoaderBatches(self.loader, num_batches)

    def check_step(self, accumulate: int) -> None:
        if accumulate > len(self):
            raise DataError(f"accumulate is {accumulate}, expected at most the {len(self)} batches per epoch")

    def training(self, seed: int, member: int, epoch: int, start: int = 0) -> Iterator[tuple[Inputs, Any]]:
        return self.epoch(seed=derive(seed, "order", member, epoch), start=start)

    def fixed(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        return self.epoch(seed=derive(FIXED_SEED, "repair"))

    def every(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        return self.epoch(seed=derive(seed, "evaluate"))

    def few(self, number: int, generator: torch.Generator | None = None) -> Source:
        return self.limited(1)

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        try:
            found = len(self.loader)
        except TypeError:
            if self.limit is None:
                raise DataError(
                    f"the loader of {self._name} has no length: pass steps_per_epoch, the number of optimizer steps to "
                    "call an epoch"
                ) from None
            return self.limit
        return found if self.limit is None else min(found, self.limit)

    @property
    def _name(self) -> str:
        return type(self.loader.dataset).__name__

    def batch(self, indices: Tensor) -> tuple[Inputs, Any]:
        """Not possible: the loader decides on its batches."""
        raise DataError(
            f"the loader of {self._name} decides on its own batches: pass a dataset, to read examples by index"
        )

    def epoch(self, *, seed: int, start: int = 0) -> Iterator[tuple[Inputs, Any]]:
        """The batches of an epoch from number `start` on; their order is a function of the seed."""
        loader, generator = self.loader, torch.Generator().manual_seed(seed)
        is_iterable = isinstance(loader.dataset, IterableDataset)
        how: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not is_iterable:
            # Drawn before, so that indices depend on the seed alone.
            sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            with torch.random.fork_rng(devices=[]), _seeded(sampler, generator):
                seed_global_(seed)
                drawn = list(itertools.islice(sampler, start, self.limit))
            how = {"sampler": drawn, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": drawn}
        # A loader of its own: several members read at the same time.
        own = DataLoader(
            loader.dataset, collate_fn=loader.collate_fn, generator=generator, **how, **_loading_options(loader)
        )
        batches = itertools.islice(own, start, self.limit) if is_iterable else own
        return (as_batch(found, self._name) for found in batches)


@contextlib.contextmanager
def _seeded(sampler: Any, generator: torch.Generator) -> Iterator[None]:
    """Let a sampler, and the one it is made of, draw from a generator inside of the block."""
    parts: list[Any] = [part for part in (sampler, getattr(sampler, "sampler", None)) if hasattr(part, "generator")]
    before = [part.generator for part in parts]
    for part in parts:
        part.generator = generator
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part.generator = own


def _loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader reads its data, besides which."""
    names = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["prefetch_factor"] if loader.num_workers else []
    return {name: getattr(loader, name) for name in names}


Reader: TypeAlias = ByIndex | LoaderBatches
"""What gives the batches of one set of data; all of them are functions of the seed that is passed in."""


def reader_of(source: Source, batch_size: int) -> Reader:
    """How batches of this size are read from a source; a loader has its own size."""
    return source if isinstance(source, LoaderBatches) else ByIndex(source, batch_size)


def from_loader(loader: DataLoader[Any]) -> Source:
    """What a `DataLoader` reads: its dataset, if that is shuffled or read in order, for members to order on their own.

    A loader with another sampler, or of an iterable dataset, decides on its own batches.
    """
    is_usual = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (RandomSampler, SequentialSampler)
    if not is_usual or getattr(loader.sampler, "replacement", False) or getattr(loader.sampler, "_num_samples", None):
        return LoaderBatches(loader)
    return Examples(loader.dataset, collate=loader.collate_fn, options=_loading_options(loader))


class Subset:
    """The examples of another source at the given indices."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """A batch of the underlying source."""
        return self.source.batch(self.indices[indices])

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Training batches of the underlying source."""
        return stream_batches(self.source, (self.indices[indices] for indices in index_batches), seed=seed, start=start)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training, validation and test data."""

    train: Source
    validation: Source
    """Used to choose the members of greedy soups; never augmented."""
    test: Source | None = None
    """Used once, after training; None to skip."""

    @property
    def num_train(self) -> int:
        """The number of examples that a member trains on in an epoch; of batches, if the data decides on them."""
        return len(self.train)


def as_source(data: Any) -> Source:
    """Wrap a pair of arrays or a torch dataset as a source; a source is returned unchanged.

    Example:
        >>> len(as_source((torch.zeros(8, 4), torch.zeros(8))))
        8
    """
    if (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and not isinstance(data[1], tuple)
        and all(isinstance(part, (Tensor, np.ndarray)) for part in [*tensors_in(data[0]), *tensors_in(data[1])])
    ):
        source: Source = Arrays(*data)
    elif isinstance(data, Source):
        source = data
    elif isinstance(data, (tuple, dict)) and _are_arrays(data):
        raise DataError(
            f"data is a {type(data).__name__} of {len(data)}, expected a pair of tensors (inputs, targets). Several "
            "inputs go by name, ({'words': ..., 'mask': ...}, targets); training, validation and test data into a "
            "papa.training.data.Data"
        )
    elif isinstance(data, IterableDataset):
        raise DataError(
            f"data is a {type(data).__name__}, which can only be read in its own order, expected a dataset with "
            "__len__ and __getitem__ here; papa.train takes a DataLoader of it"
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
    """Whether the data is up to three arrays, or pairs of arrays, rather than a sequence of examples."""
    found = list(data.values()) if isinstance(data, dict) else list(data)
    parts = [part for one in found for part in (one if isinstance(one, (tuple, list)) else [one])]
    return 0 < len(found) <= 3 and all(isinstance(part, (Tensor, np.ndarray)) and part.ndim > 0 for part in parts)


def hold_out(source: Source, share: float, *, seed: int) -> tuple[Source, Source]:
    """The part for training and a share split off for validation; the split depends on the seed alone."""
    num_held_out = round(len(source) * share)
    if not 0 < num_held_out < len(source):
        raise DataError(
            f"a validation share of {share} holds out {num_held_out} of {len(source)} examples, expected at least one "
            "for validation and one for training"
        )
    order = torch.randperm(len(source), generator=stream(seed, "split"), device="cpu")
    return Subset(source, order[num_held_out:]), Subset(source, order[:num_held_out])


def stream_batches(
    source: Source, index_batches: Iterable[Tensor], *, seed: int, start: int = 0
) -> Iterator[tuple[Inputs, Tensor]]:
    """Training batches in turn, from the source's `stream` if it has one, otherwise from its `batch`.

    Indices are read lazily, a few batches ahead. The random numbers of a streaming source for batch `n` depend on
    `seed` and `n` alone; the first batch is number `start`.

    Example:
        >>> source = Arrays(torch.arange(6), torch.zeros(6))
        >>> [inputs.tolist() for inputs, _ in stream_batches(source, torch.tensor([[5, 0], [2, 1]]), seed=1)]
        [[5, 0], [2, 1]]
    """
    if isinstance(source, Streaming):
        return source.stream(index_batches, seed=seed, start=start)
    return (source.batch(indices) for indices in index_batches)


def as_any_source(data: Any, batch_size: int) -> Source:
    """A source, or the batches of a loader; an iterable dataset gets a loader with this batch size."""
    if isinstance(data, LoaderBatches):
        return data
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size, drop_last=True)
    return from_loader(data) if isinstance(data, DataLoader) else as_source(data)


def as_data(data: Any, validation: Any, *, seed: int, batch_size: int = 64) -> Data:
    """Convert data and validation data as `papa.train` takes them; the batch size is for iterable datasets."""

    def convert(part: Any) -> Source:
        return as_any_source(part, batch_size)

    if isinstance(data, Data):
        test = None if data.test is None else convert(data.test)
        return Data(train=convert(data.train), validation=convert(data.validation), test=test)
    train = convert(data)
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        return Data(train=train, validation=convert(validation))
    if isinstance(train, LoaderBatches):
        raise DataError(
            "the loader has a sampler of its own or an iterable dataset, of which no share can be held out: pass "
            "validation data, as validation=dataset or another loader"
        )
    train, held_out = hold_out(train, validation, seed=seed)
    return Data(train=train, validation=held_out)
