"""Loaders: for each member a `DataLoader` over the same data, with its own order and its own workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from papa.errors import DataError
from papa.population import Population
from papa.streams import stream


def loaders(
    dataset: Any,
    *,
    members: int | Iterable[int] | Population,
    batch_size: int = 64,
    seed: int = 1,
    sampler: Callable[[torch.Generator], Sampler[Any]] | None = None,
    shuffle: bool = True,
    drop_last: bool = True,
    **options: Any,
) -> list[DataLoader[Any]]:
    """A `DataLoader` for each member, over the same data in an order of its own.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.arange(8))
        >>> first, second = loaders(dataset, members=2, batch_size=4)
        >>> for (ours,), (theirs,) in zip(first, second):
        ...     assert ours.shape == theirs.shape == (4,)

    Args:
        dataset: any torch dataset, or a function from a member's index to its dataset. Members of an
            `IterableDataset` have no order of their own unless the function gives them one, such as
            `lambda member: stream.shuffle(seed=member)`.
        members: the number of members, their indices, or the population, whose local members are meant.
        batch_size: examples per batch.
        seed: of the orders; that of a member depends on the seed and its index only.
        sampler: from a generator to the sampler of a member, such as
            `lambda generator: WeightedRandomSampler(weights, len(weights), generator=generator)`.
        shuffle: draw a new order in every epoch, if no sampler is given.
        drop_last: leave out the last incomplete batch, so that all batches have one size.
        options: further options of `DataLoader`: `num_workers`, `collate_fn`, `pin_memory` and so on.
    """
    if isinstance(dataset, DataLoader):
        raise DataError("dataset is a DataLoader, expected a dataset: pass loader.dataset, and the loader's options")
    if "generator" in options:
        raise DataError("generator is set for each member: give a seed instead")
    makes_datasets = callable(dataset) and not hasattr(dataset, "__getitem__")
    found = []
    for member in _indices(members):
        own = dataset(member) if makes_datasets else dataset
        generator = stream(seed, "loader", member)
        is_iterable = isinstance(own, IterableDataset)
        if is_iterable and sampler is not None:
            raise DataError(f"{type(own).__name__} is read in its own order, got a sampler too: leave out the sampler")
        if drop_last and not is_iterable and len(own) < batch_size:
            raise DataError(
                f"the data has {len(own)} examples, expected at least batch_size ({batch_size}), since incomplete "
                "batches are left out: make batches smaller, or set drop_last=False"
            )
        order: dict[str, Any] = {"sampler": sampler(generator)} if sampler is not None else {"shuffle": shuffle}
        found.append(
            DataLoader(
                own,
                batch_size=batch_size,
                generator=generator,  # of the order, and of the seeds of workers
                drop_last=drop_last,
                **({} if is_iterable else order),
                **options,
            )
        )
    return found


def _indices(members: int | Iterable[int] | Population) -> list[int]:
    if isinstance(members, Population):
        return list(members.members)
    indices = list(range(members)) if isinstance(members, int) else list(members)
    if not indices or not all(isinstance(member, int) and member >= 0 for member in indices):
        raise DataError(f"members is {members!r}, expected the number of members, their indices, or the population")
    return indices
