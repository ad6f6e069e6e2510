"""Loaders: for each member a `DataLoader` over the same data, with its own order and its own workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from papa.core.population import Population
from papa.errors import DataError
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
) -> list[MemberLoader]:
    """A `DataLoader` for each member, over the same data in an order of its own.

    Each has a `state_dict` and a `load_state_dict`, to continue where it was saved: see `MemberLoader`.

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
    found: list[MemberLoader] = []
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
            MemberLoader(
                own,
                batch_size=batch_size,
                generator=generator,  # of the order, and of the seeds of workers
                drop_last=drop_last,
                **({} if is_iterable else order),
                **options,
            )
        )
    return found


class MemberLoader(DataLoader[Any]):
    """The `DataLoader` of one member, as `loaders` makes it: it continues where it was saved.

    A state that is saved within an epoch continues there, with the next batch; one of an `IterableDataset`, which has
    no positions, with the next epoch. What workers draw continues too, unless they are persistent.
    """

    _start: Tensor | None = None
    """The state of the generator when the epoch began; None between epochs."""
    _num_batches = 0
    """How many batches of the epoch were given; or are to be skipped, after a state was loaded."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of an epoch, which begins when the first one is asked for."""
        num_skipped = self._num_batches if self._start is None else 0
        self._start, self._num_batches = self.generator.get_state(), num_skipped
        if self.persistent_workers and self._iterator is not None:  # a new iterator would draw the seed of its workers
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        iterator: Any = super().__iter__()
        for _ in range(num_skipped):
            # Workers draw random numbers for each example. Without workers, examples draw from the global generators,
            # which the checkpoint restores by itself: so none may be read.
            next(iterator) if self.num_workers else iterator._next_index()
        num_total = None if self._is_iterable else len(self)
        for batch in iterator:
            self._num_batches += 1
            is_last = self._num_batches == num_total
            if is_last:  # a loop may not ask for more, but samplers draw once more at their end
                next(iterator, None)
                self.end_epoch()
            yield batch
            if is_last:
                return
        self.end_epoch()

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def end_epoch(self) -> None:
        """Let a state that is saved now continue with a new epoch, though a `break` left out the rest of this one."""
        self._start, self._num_batches = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: a state of its generator, and the number of batches since then."""
        if self._is_iterable:
            return {"generator": self.generator.get_state(), "num_batches": 0}
        start = self.generator.get_state() if self._start is None else self._start
        return {"generator": start, "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`: the next iteration gives the batches that are left of that epoch."""
        if not isinstance(state, dict) or state.keys() != {"generator", "num_batches"}:
            raise DataError(f"the state of a loader is {state!r}, expected generator and num_batches, of a state_dict")
        if not self._is_iterable and state["num_batches"] >= len(self):
            raise DataError(
                f"the state has {state['num_batches']} batches of an epoch, this loader has {len(self)}: pass the same "
                "data and batch_size as when it was saved"
            )
        self.generator.set_state(state["generator"].cpu())
        self._start, self._num_batches = None, state["num_batches"]


def _indices(members: int | Iterable[int] | Population) -> list[int]:
    if isinstance(members, Population):
        return list(members.members)
    indices = list(range(members)) if isinstance(members, int) else list(members)
    if not indices or not all(isinstance(member, int) and member >= 0 for member in indices):
        raise DataError(f"members is {members!r}, expected the number of members, their indices, or the population")
    return indices
