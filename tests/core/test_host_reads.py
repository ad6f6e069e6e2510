"""A step in which nothing is due reads nothing of members back to the host, one in which something is due reads once.

On an accelerator every read waits until the device has finished its work. Here all tensors are on the CPU, so what was
computed from members' weights is followed through every operator, and reads of it are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import make_networks
from papa import Averager, MergeAll, MergePairs, Population, Push, average_soup
from papa.core.diagnostics import NUM_AVERAGINGS_CHECKED
from papa.core.rules import Rule
from papa.training import Settings, Training

pytestmark = pytest.mark.usefixtures("_torch_operators")  # what accelerators use

aten = torch.ops.aten
READING_OPERATORS = {
    *(aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero, aten.masked_select, aten._unique2),
    *(aten.unique_dim, aten.unique_consecutive, aten.bincount),
}
"""Those that wait for an accelerator: they return numbers, or tensors whose shape depends on numbers."""
READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


class HostReads(TorchDispatchMode):
    """Counts reads of what was computed from a population's weights."""

    def __init__(self, population: Population) -> None:
        super().__init__()
        self.count = 0
        self._ranges = [(rows.data_ptr(), rows.data_ptr() + rows.nbytes) for rows in population.matrices.values()]
        self._derived: list[Tensor] = []
        """Kept, so that no other tensor gets their memory."""
        self._pointers: set[int] = set()
        self._methods = _Methods(self)

    def is_of_members(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return False
        pointer = tensor.untyped_storage().data_ptr()
        return pointer in self._pointers or any(start <= pointer < end for start, end in self._ranges)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_derived = any(self.is_of_members(leaf) for leaf in tree_leaves((args, kwargs)))
        found = func(*args, **(kwargs or {}))
        if is_derived:
            self.count += func.overloadpacket in READING_OPERATORS
            self._derived += [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            self._pointers |= {leaf.untyped_storage().data_ptr() for leaf in self._derived}
        return found

    def __enter__(self) -> HostReads:
        self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._methods.__exit__(*args)


class _Methods(TorchFunctionMode):
    """Sees the methods that read without an operator."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._reads.count += func in READING_METHODS and self._reads.is_of_members(args[0])
        return func(*args, **(kwargs or {}))


def reads_of(population: Population, run: Callable[[], object]) -> int:
    with HostReads(population) as reads:
        run()
    return reads.count


def averager_of(rule: Rule, networks: list[nn.Module], **options: Any) -> Averager:
    """An averager that has made its first averagings, in which mistakes are looked for."""
    population = Population(networks)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in population]
    averager = Averager(population, rule, optimizers, **options)
    for _ in range((NUM_AVERAGINGS_CHECKED + 1) * rule.every_steps):
        averager.step()
    return averager


def test_reads_are_counted() -> None:
    population = Population(make_networks("linear", 2))
    weight = population[0][0].weight.detach()
    assert reads_of(population, lambda: float((weight * 2.0).sum())) == 1
    assert reads_of(population, lambda: bool((weight > 0).all())) == 1
    assert reads_of(population, (weight + 1.0).tolist) == 0  # made before
    assert reads_of(population, lambda: (weight + 1.0).tolist()) == 1
    assert reads_of(population, lambda: torch.ones(2).tolist()) == 0


@pytest.mark.parametrize("kind", ["linear", "conv_batch_norm"])
@pytest.mark.parametrize("options", [{}, {"measure": False}, {"on_nonfinite": None}], ids=str)
@pytest.mark.parametrize("rule", [Push(alpha=0.9, every_steps=2), MergeAll(every_steps=2), MergePairs(every_steps=2)])
def test_a_step_of_the_averager_reads_at_most_once(rule: Rule, options: dict[str, Any], kind: str) -> None:
    averager = averager_of(rule, make_networks(kind, 3), **options)
    assert reads_of(averager.population, averager.step) == 0  # nothing is due
    assert reads_of(averager.population, averager.step) == 1


@pytest.mark.parametrize("rule", [Push(alpha=0.9, every_steps=2), MergeAll(every_steps=2), MergePairs(every_steps=2)])
def test_nothing_is_read_if_nothing_is_measured(rule: Rule) -> None:
    averager = averager_of(rule, make_networks("conv_batch_norm", 3), measure=False, on_nonfinite=None)
    assert reads_of(averager.population, lambda: [averager.step(), averager.step()]) == 0


def test_a_soup_is_read_once_whatever_the_number_of_its_tensors() -> None:
    population = Population(make_networks("conv_batch_norm", 3))
    assert reads_of(population, lambda: average_soup(population)) == 1


def test_learning_rates_that_are_tensors_are_read_only_for_a_push() -> None:
    population = Population(make_networks("linear", 2))
    rates = [torch.tensor(0.1), torch.tensor(0.1)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=lr) for net, lr in zip(population, rates, strict=True)]
    averager = Averager(population, Push(alpha=0.9, every_steps=2), optimizers, measure=False, on_nonfinite=None)
    with CountScalars() as scalars:
        averager.step()
        assert scalars.count == 0
    for rate in rates:
        rate.fill_(0.05)
    record = averager.step()
    assert record is not None
    assert record.alpha == pytest.approx(0.95)


class CountScalars(TorchDispatchMode):
    """Counts all tensors of which a number is read."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket in READING_OPERATORS
        return func(*args, **(kwargs or {}))


def test_distances_after_a_merge_are_read_when_they_are_used() -> None:
    averager = averager_of(MergePairs(every_steps=1), make_networks("linear", 3))
    log = averager.step()
    assert log is not None
    assert log.distances_after == tuple(averager.population.distances().tolist())


def test_a_health_check_reads_once() -> None:
    averager = averager_of(Push(alpha=0.9, every_steps=2), make_networks("conv_batch_norm", 3))
    assert reads_of(averager.population, averager.check_health) == 1


def test_training_reads_only_when_members_are_averaged() -> None:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    settings = Settings(
        num_members=3,
        num_epochs=2,
        batch_size=4,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    training = Training(lambda: nn.Linear(4, 2), (inputs, (inputs.sum(dim=1) > 0).long()), settings)
    training.use_rule(Push(alpha=0.9, every_steps=2))
    for _ in range(2 * (NUM_AVERAGINGS_CHECKED + 1)):
        training._take_step()
    assert reads_of(training.population, training._take_step) == 0
    assert reads_of(training.population, training._take_step) == 1
