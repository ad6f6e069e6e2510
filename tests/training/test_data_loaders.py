from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from papa import Population, loaders
from papa.errors import DataError

NUMBERS = TensorDataset(torch.arange(20))


def orders(found: Iterable[DataLoader[Any]], num_epochs: int = 2) -> list[list[int]]:
    return [[int(number) for _ in range(num_epochs) for (batch,) in loader for number in batch] for loader in found]


def test_each_member_has_an_order_of_its_own_that_depends_on_seed_and_index_only() -> None:
    first, second, third = orders(loaders(NUMBERS, members=3, batch_size=4))
    assert sorted(first[:20]) == sorted(second[20:]) == list(range(20))
    assert first != second != third
    assert first[:20] != first[20:]
    assert orders(loaders(NUMBERS, members=[2, 0], batch_size=4)) == [third, first]
    assert orders(loaders(NUMBERS, members=1, batch_size=4, seed=2)) != [first]
    population = Population([nn.Linear(1, 1) for _ in range(2)])
    assert orders(loaders(NUMBERS, members=population, batch_size=4)) == [first, second]


def numbers(batches: Iterable[Any]) -> list[int]:
    return [int(number) for (batch,) in batches for number in batch]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_state_continues_with_the_next_batch(workers: dict[str, Any]) -> None:
    options: dict[str, Any] = {"members": 2, "batch_size": 4, **workers}
    whole = orders(loaders(NUMBERS, **options), num_epochs=3)
    found = loaders(NUMBERS, **options)
    given: list[list[int]] = [[], []]
    for _ in range(2):
        for number, batches in enumerate(zip(*found, strict=False)):
            for one, batch in zip(given, batches, strict=True):
                one += numbers([batch])
            if number in (2, 4):  # within an epoch, and after its last batch
                states = [loader.state_dict() for loader in found]
                resumed = loaders(NUMBERS, **options)
                for loader, state in zip(resumed, states, strict=True):
                    loader.load_state_dict(state)
                    assert torch.equal(loader.state_dict()["generator"], state["generator"])
                    assert loader.state_dict()["num_batches"] == state["num_batches"]
                iter(resumed[0])  # without a batch, it is no epoch
                for one, loader, expected in zip(given, resumed, whole, strict=True):
                    left = numbers(loader) + numbers(loader)
                    assert [*one, *left][:60] == expected[: len(one) + len(left)]
    assert given == [one[:40] for one in whole]
    assert [state["num_batches"] for state in states] == [0, 0]


def test_to_continue_draws_no_global_random_numbers() -> None:
    (loader,) = loaders(Noisy(), members=1, batch_size=4)
    loader.load_state_dict({**loader.state_dict(), "num_batches": 1})
    torch.manual_seed(0)
    ((batch,),) = loader
    torch.manual_seed(0)
    assert torch.equal(batch, torch.stack([torch.rand(()) for _ in range(4)]))


def test_an_order_does_not_depend_on_whether_loops_ask_for_one_batch_too_many() -> None:
    found, others = (loaders(NUMBERS, members=2, batch_size=4) for _ in range(2))
    zipped = [batches for _ in range(2) for batches in zip(*found, strict=False)]  # asks the first one only
    assert [numbers(member) for member in zip(*zipped, strict=True)] == orders(others)


def test_a_state_after_a_break_continues_the_epoch_unless_it_was_ended() -> None:
    first, second, third = (loaders(NUMBERS, members=1, batch_size=4)[0] for _ in range(3))
    for loader in (first, second):
        (given,) = next(iter(loader))
    third.load_state_dict(first.state_dict())
    assert sorted([*given.tolist(), *numbers(third)]) == list(range(20))
    second.end_epoch()
    third.load_state_dict(second.state_dict())
    assert numbers(third) == numbers(second) == numbers(first)
    assert len(numbers(third)) == 20


def test_an_iterable_dataset_continues_with_the_next_epoch() -> None:
    (loader,), (other,) = (loaders(lambda member: Counting(0), members=1, batch_size=4) for _ in range(2))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert numbers(other) == list(range(8))


def test_all_batches_have_one_size_unless_asked_otherwise() -> None:
    (loader,) = loaders(NUMBERS, members=1, batch_size=6)
    assert [len(batch) for (batch,) in loader] == [6, 6, 6]
    (loader,) = loaders(NUMBERS, members=1, batch_size=6, drop_last=False, shuffle=False)
    assert [batch.tolist() for (batch,) in loader][-1] == [18, 19]


class Noisy(Dataset[tuple[Tensor]]):
    """Random transforms, in workers too."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.rand(()),)


def test_workers_draw_random_numbers_of_their_own() -> None:
    def drawn() -> list[list[float]]:
        found = loaders(Noisy(), members=2, batch_size=4, num_workers=1)
        return [[float(number) for (batch,) in loader for number in batch] for loader in found]

    first, second = drawn()
    assert first != second
    assert drawn() == [first, second]


def test_samplers_and_collate_functions() -> None:
    weights = torch.tensor([1.0] * 5 + [0.0] * 15)
    found = loaders(
        NUMBERS,
        members=2,
        batch_size=4,
        sampler=lambda generator: WeightedRandomSampler(weights.tolist(), 20, generator=generator),
        collate_fn=lambda examples: (torch.stack([number for (number,) in examples]),),
    )
    first, second = orders(found)
    assert first != second
    assert max(first + second) < 5


class Counting(IterableDataset[tuple[Tensor]]):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter((torch.tensor(self.start + number),) for number in range(8))


def test_a_function_gives_each_member_a_dataset() -> None:
    found = orders(loaders(lambda member: Counting(100 * member), members=2, batch_size=4), num_epochs=1)
    assert found == [list(range(8)), list(range(100, 108))]


def test_wrong_uses() -> None:
    with pytest.raises(DataError, match=r"members is 0, expected the number of members, their indices"):
        loaders(NUMBERS, members=0)
    with pytest.raises(DataError, match=r"dataset is a DataLoader, expected a dataset: pass loader.dataset"):
        loaders(DataLoader(NUMBERS), members=2)
    with pytest.raises(DataError, match=r"the data has \d+ examples, expected at least batch_size \(1000\)"):
        loaders(NUMBERS, members=2, batch_size=1000)
    (loader,) = loaders(NUMBERS, members=1, batch_size=4)
    with pytest.raises(DataError, match=r"state of a loader is \{'epoch': 1\}, expected generator and num_batches"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(DataError, match=r"the state has 7 batches of an epoch, this loader has 5: pass the same data"):
        loader.load_state_dict({**loader.state_dict(), "num_batches": 7})
    with pytest.raises(DataError, match=r"generator is set for each member: give a seed instead"):
        loaders(NUMBERS, members=2, batch_size=2, generator=torch.Generator())
    with pytest.raises(DataError, match=r"Counting is read in its own order, got a sampler too"):
        loaders(Counting(0), members=2, sampler=lambda generator: WeightedRandomSampler([1.0], 1))
