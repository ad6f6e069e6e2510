from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from helpers import assert_same_bits, make_networks, snapshot
from papa.core import mixing
from papa.core.averager import Averager, Averaging
from papa.core.population import Population
from papa.core.rules import AveragingContext, Independent, MergeAll, MergePairs, Mix, Push, Rule
from papa.couplings.anchored import OuterStep
from papa.couplings.sparse import SparseAverage
from papa.errors import MixingError, PapaWarning


def sgd(network: nn.Module, lr: float = 0.1) -> optim.SGD:
    return optim.SGD(network.parameters(), lr=lr, momentum=0.9)


def ratios_along(
    make_scheduler: Callable[[optim.Optimizer], object] | None, lrs: list[float] | None = None, num_steps: int = 6
) -> list[float]:
    """The learning-rate ratios that a rule gets to see at the first steps of a schedule, or of lrs set by hand."""
    seen: list[float] = []

    def note(context: AveragingContext) -> Tensor:
        seen.append(context.lr_ratio)
        return mixing.identity(context.size)

    population = Population(make_networks("linear", 2))
    optimizers = [sgd(network) for network in population]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers] if make_scheduler else []
    averager = Averager(population, Mix(note, every_steps=1), optimizers)
    for step in range(num_steps if lrs is None else len(lrs)):
        for optimizer in optimizers:
            optimizer.step()
            if lrs is not None:
                optimizer.param_groups[0]["lr"] = lrs[step]
        for scheduler in schedulers:
            scheduler.step()
        averager.step()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_push_that_few_bits_cannot_hold_is_warned_of_and_measured(dtype: torch.dtype) -> None:
    networks = [network.to(dtype) for network in make_networks("linear", 3)]
    population = Population(networks)
    with pytest.warns(UserWarning, match="is lost in the rounding of bfloat16 and float16 weights"):
        averager = Averager(population, Push(alpha=0.9999, every_steps=1))
    log = averager.step()
    assert log is not None
    assert log.distances_after == tuple(population.distances().tolist())
    Averager(population, Push(alpha=0.5, every_steps=1))  # no warning


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_push_has_the_bits_of_its_matrix_given_as_one(size: int, dtype: torch.dtype) -> None:
    pushed, mixed = (
        Population([network.to(dtype) for network in make_networks("conv_batch_norm", size)]) for _ in range(2)
    )
    averagers = (
        Averager(pushed, Push(alpha=0.7, every_steps=1)),
        Averager(mixed, Mix(mixing.push(size, 0.7), every_steps=1)),
    )
    for _ in range(3):
        logs = [averager.step() for averager in averagers]
        assert logs[0] is not None
        assert logs[1] is not None
        assert logs[0].distances_before == logs[1].distances_before
    for first, second in zip(pushed, mixed, strict=True):
        assert_same_bits(snapshot(first), snapshot(second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda population: (list(population), Push(alpha=0.9)), "needs a papa.Population, got a list: make one first"),
        (lambda population: (population, Push), "needs a rule such as .*, got the class Push"),
        (lambda population: (population, "push"), "needs a rule such as .*, got a str"),
    ],
)
def test_what_is_no_population_or_no_rule_is_refused(arguments: Callable[..., tuple[Any, Any]], message: str) -> None:
    with pytest.raises(MixingError, match=message):
        Averager(*arguments(Population(make_networks("linear", 2))))


def test_states_of_something_else_are_refused() -> None:
    averager = Averager(Population(make_networks("linear", 2)), Push(alpha=0.9))
    with pytest.raises(MixingError, match="the state has no highest_lrs, num_averagings, num_steps_taken"):
        averager.load_state_dict({})
    with pytest.raises(MixingError, match=r"the state dropped members \[3\], this population has 2"):
        averager.load_state_dict({**averager.state_dict(), "dropped": [3]})


class TestLearningRateRatio:
    def test_a_cycle_is_a_share_of_its_peak_once_it_was_seen(self) -> None:
        def cyclic(optimizer: optim.Optimizer) -> object:
            return lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2, step_size_down=2)

        found = ratios_along(cyclic, num_steps=6)
        assert found[1:] == pytest.approx([1.0, 0.55, 0.1, 0.55, 1.0])

    def test_cosine(self) -> None:
        found = ratios_along(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=6))
        assert found == pytest.approx([(1 + math.cos(math.pi * step / 6)) / 2 for step in range(1, 7)], abs=1e-12)

    def test_multistep(self) -> None:
        found = ratios_along(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5]))
        assert found == pytest.approx([1.0, 0.1, 0.1, 0.1, 0.01, 0.01])

    def test_warm_up_is_a_share_of_the_base(self) -> None:
        found = ratios_along(lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3))
        assert found == pytest.approx([0.5, 0.75, 1.0, 1.0, 1.0, 1.0])

    def test_warm_up_then_cosine(self) -> None:
        def make(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
            warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
            cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
            return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])

        assert ratios_along(make)[:2] == pytest.approx([0.75, 1.0])
        assert ratios_along(make)[-1] == pytest.approx(0.0)

    def test_one_cycle_is_a_share_of_its_peak(self) -> None:
        def make(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
            return lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.4, total_steps=11, pct_start=0.5, anneal_strategy="linear"
            )

        found = ratios_along(make, num_steps=10)
        assert max(found) == pytest.approx(1.0, rel=0.1)
        assert found == pytest.approx([lr / 0.4 for lr in one_cycle_lrs()], rel=1e-6)

    def test_lambdas_above_one_are_clamped(self) -> None:
        found = ratios_along(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 2))
        assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0])

    def test_without_a_schedule_it_is_one(self) -> None:
        assert ratios_along(None) == [1.0] * 6

    def test_set_by_hand_it_is_a_share_of_the_highest_seen(self) -> None:
        assert ratios_along(None, lrs=[0.1, 0.05, 0.2, 0.1, 0.0]) == pytest.approx([1.0, 0.5, 1.0, 0.5, 0.0])

    def test_on_a_plateau_it_is_a_share_of_the_highest_seen(self) -> None:
        population = Population(make_networks("linear", 1))
        optimizer = sgd(population[0])
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        averager = Averager(population, Push(alpha=0.8, every_steps=1), optimizer)
        scheduler.step(1.0)
        assert averager.step().alpha == pytest.approx(0.8)
        scheduler.step(2.0)
        assert averager.step().alpha == pytest.approx(0.9)

    def test_a_learning_rate_of_zero_from_the_start_pushes_nothing(self) -> None:
        population = Population(make_networks("linear", 2))
        optimizers = [sgd(network, lr=0.0) for network in population]
        assert Averager(population, Push(alpha=0.99, every_steps=1), optimizers).step().alpha == 1.0

    def test_group_zero_counts(self) -> None:
        population = Population(make_networks("linear", 1))
        body, head = population[0][0], population[0][2]
        optimizer = optim.SGD([{"params": body.parameters(), "lr": 0.2}, {"params": head.parameters(), "lr": 0.1}])
        averager = Averager(population, Push(alpha=0.8, every_steps=1), optimizer)
        optimizer.param_groups[1]["lr"] = 0.0
        assert averager.step().alpha == pytest.approx(0.8)
        optimizer.param_groups[0]["lr"] = 0.1
        assert averager.step().alpha == pytest.approx(0.9)

    def test_learning_rates_held_in_tensors(self) -> None:
        population = Population(make_networks("linear", 1))
        optimizer = optim.SGD(population[0].parameters(), lr=torch.tensor(0.2))
        averager = Averager(population, Push(alpha=0.8, every_steps=1), optimizer)
        optimizer.param_groups[0]["lr"].fill_(0.1)
        assert averager.step().alpha == pytest.approx(0.9)

    def test_an_explicit_ratio_wins_and_is_clamped(self) -> None:
        population = Population(make_networks("linear", 2))
        optimizers = [sgd(network) for network in population]
        averager = Averager(population, Push(alpha=0.8, every_steps=1), optimizers)
        assert averager.step(lr_ratio=0.5).alpha == pytest.approx(0.9)
        assert averager.step(lr_ratio=7.0).alpha == pytest.approx(0.8)
        assert averager.step(lr_ratio=-1.0).alpha == 1.0
        optimizers[1].param_groups[0]["lr"] = 0.01
        assert averager.step(lr_ratio=0.5).alpha == pytest.approx(0.9)

    def test_members_may_have_different_learning_rates_at_one_ratio(self) -> None:
        population = Population(make_networks("linear", 2))
        optimizers = [sgd(population[0], lr=0.1), sgd(population[1], lr=0.3)]
        averager = Averager(population, Push(alpha=0.8, every_steps=1), optimizers)
        optimizers[0].param_groups[0]["lr"], optimizers[1].param_groups[0]["lr"] = 0.05, 0.15
        assert averager.step().alpha == pytest.approx(0.9)

    def test_different_ratios_are_refused(self) -> None:
        population = Population(make_networks("linear", 2))
        optimizers = [sgd(network) for network in population]
        averager = Averager(population, Push(alpha=0.99, every_steps=1), optimizers)
        optimizers[1].param_groups[0]["lr"] = 0.05
        message = (
            r"optimizer 1 is at 0.5 of its highest learning rate, optimizer 0 at 1: a push needs one ratio for all, "
            r"pass it as averager.step\(lr_ratio=...\)"
        )
        with pytest.raises(MixingError, match=message):
            averager.step()

    def test_a_ratio_that_is_no_number_is_refused(self) -> None:
        averager = Averager(Population(make_networks("linear", 2)), Push(alpha=0.99, every_steps=1))
        with pytest.raises(MixingError, match="lr_ratio is NaN, expected a number from 0 to 1"):
            averager.step(lr_ratio=math.nan)


def one_cycle_lrs() -> list[float]:
    """From a 25th of the peak up to it and down to a ten-thousandth of the start, as torch documents it."""
    peak, first = 0.4, 0.4 / 25
    last, top = first / 1e4, 0.5 * 11 - 1
    up = [first + (peak - first) * step / top for step in range(1, 5)]
    down = [peak + (last - peak) * (step - top) / (10 - top) for step in range(5, 11)]
    return up + down


class TestSteps:
    def test_steps_are_counted_across_epochs(self) -> None:
        averager = Averager(Population(make_networks("linear", 2)), MergeAll(every_steps=4))
        happened = [[averager.step() is not None for _ in range(3)] for _epoch in range(4)]
        assert happened == [[False] * 3, [True, False, False], [False, True, False], [False, False, True]]
        assert averager.num_steps_taken == 12

    def test_nothing_happens_when_nothing_is_due(self) -> None:
        population = Population(make_networks("linear", 2))
        before = [snapshot(network) for network in population]
        averager = Averager(population, Independent())
        assert [averager.step() for _ in range(20)] == [None] * 20
        for network, state in zip(population, before, strict=True):
            assert_same_bits(snapshot(network), state)

    def test_the_last_step_pushes_but_does_not_merge(self) -> None:
        for rule, expected in ((Push(alpha=0.99, every_steps=2), [2, 4]), (MergeAll(every_steps=2), [2])):
            averager = Averager(Population(make_networks("linear", 2)), rule, num_steps=4)
            records = [averager.step() for _ in range(4)]
            assert [record.step for record in records if record] == expected

    def test_a_negative_number_of_steps_is_refused(self) -> None:
        with pytest.raises(MixingError, match="num_steps is -1, expected the number of steps of the whole training"):
            Averager(Population(make_networks("linear", 2)), Push(alpha=0.99), num_steps=-1)

    def test_a_window_is_obeyed(self) -> None:
        averager = Averager(Population(make_networks("linear", 2)), MergeAll(every_steps=2, start=4, stop=8))
        records = [averager.step() for _ in range(10)]
        assert [record.step for record in records if record] == [4, 6]


class TestRecord:
    def test_a_push_tells_step_alpha_and_distances(self) -> None:
        population = Population([network.double() for network in make_networks("conv_batch_norm", 3)])
        averager = Averager(population, Push(alpha=0.7, every_steps=2))
        before = population.distances().tolist()
        assert averager.step() is None
        record = averager.step()
        assert (record.step, record.rule, record.alpha) == (2, "Push", pytest.approx(0.7))
        assert record.distances_before == pytest.approx(before, rel=1e-12)
        assert record.distances_after == pytest.approx([0.7 * distance for distance in before], rel=1e-12)
        assert record.distances_after == pytest.approx(population.distances().tolist(), rel=1e-12)

    def test_a_push_tells_the_truth_in_float32(self) -> None:
        population = Population(make_networks("conv_batch_norm", 5))
        record = Averager(population, Push(alpha=0.99, every_steps=1)).step()
        assert record.distances_after == pytest.approx(population.distances().tolist(), rel=1e-5)

    def test_a_push_is_measured_when_something_else_moves_members(self) -> None:
        @contextlib.contextmanager
        def shrink(population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
            with torch.no_grad():
                for parameter in population[0].parameters():
                    parameter.mul_(0.5)
            yield

        population = Population(make_networks("linear", 3))
        record = Averager(population, Push(alpha=0.7, every_steps=1), merge_hooks=shrink).step()
        assert record.distances_after == tuple(population.distances().tolist())

    def test_a_merge_tells_measured_distances_and_no_alpha(self) -> None:
        population = Population(make_networks("linear", 3))
        before = population.distances().tolist()
        record = Averager(population, MergePairs(every_steps=1)).step()
        assert (record.step, record.rule, record.alpha) == (1, "MergePairs", None)
        assert record.distances_before == pytest.approx(before)
        assert record.distances_after == tuple(population.distances().tolist())
        assert record.distances_after != record.distances_before

    @pytest.mark.parametrize("rule", [Push(alpha=0.7, every_steps=1), MergeAll(every_steps=1)])
    def test_unmeasured_it_mixes_all_the_same(self, rule: Rule) -> None:
        measured, unmeasured = Population(make_networks("linear", 3)), Population(make_networks("linear", 3))
        Averager(measured, rule).step()
        record = Averager(unmeasured, rule, measure=False).step()
        assert record.distances_before is record.distances_after is None
        for one, other in zip(measured, unmeasured, strict=True):
            assert_same_bits(snapshot(one), snapshot(other))


def algorithm_1(
    networks: list[nn.Module], batches: list[Tensor], *, alpha: float, every_steps: int, lr: float
) -> list[dict[str, Tensor]]:
    """PAPA as the paper writes it: plain loops over state dicts, nothing shared with the library."""
    optimizers = [sgd(network, lr) for network in networks]
    schedulers = [lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches)) for optimizer in optimizers]
    for step, batch in enumerate(batches, start=1):
        for network, optimizer, scheduler in zip(networks, optimizers, schedulers, strict=True):
            train_one_step(network, optimizer, batch)
            scheduler.step()
        if step % every_steps == 0:
            kept = 1 - (1 - alpha) * schedulers[0].get_last_lr()[0] / lr
            states = [network.state_dict() for network in networks]
            mean = {key: sum(state[key] for state in states) / len(states) for key in states[0]}
            for network, state in zip(networks, states, strict=True):
                pushed = {
                    key: kept * value + (1 - kept) * mean[key] if value.is_floating_point() else value
                    for key, value in state.items()
                }
                network.load_state_dict(pushed)
    return [snapshot(network) for network in networks]


def train_one_step(network: nn.Module, optimizer: optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    network(batch).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_it_marches_in_lockstep_with_algorithm_1(size: int, every_steps: int) -> None:
    batches = [torch.randn(4, 2, 4, 4, dtype=torch.float64) for _ in range(9)]
    networks = [network.double() for network in make_networks("conv_batch_norm", size)]
    expected = algorithm_1(copy.deepcopy(networks), batches, alpha=0.9, every_steps=every_steps, lr=0.05)

    population = Population(networks)
    optimizers = [sgd(network, lr=0.05) for network in population]
    schedulers = [lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches)) for optimizer in optimizers]
    averager = Averager(population, Push(alpha=0.9, every_steps=every_steps), optimizers, watch_batches=False)
    for batch in batches:
        for network, optimizer, scheduler in zip(population, optimizers, schedulers, strict=True):
            train_one_step(network, optimizer, batch)
            scheduler.step()
        averager.step()

    for network, state in zip(population, expected, strict=True):
        for name, tensor in snapshot(network).items():
            assert torch.allclose(tensor, state[name], rtol=1e-10, atol=1e-12), name


class TestState:
    @pytest.mark.parametrize("rule", [Push(alpha=0.9, every_steps=2), MergePairs(every_steps=2, seed=5)])
    def test_a_resumed_averager_goes_on_as_if_never_stopped(self, rule: Rule) -> None:
        unbroken, records = self.run(rule, stop_after=None)
        resumed, resumed_records = self.run(rule, stop_after=3)
        assert resumed_records == records
        for one, other in zip(unbroken, resumed, strict=True):
            assert_same_bits(snapshot(one), snapshot(other))

    def run(self, rule: Rule, stop_after: int | None) -> tuple[Population, list[Averaging | None]]:
        population = Population(make_networks("linear", 3))
        optimizers = [sgd(network) for network in population]
        averager = Averager(population, rule, optimizers, num_steps=8)
        records = []
        for step in range(8):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 8)
            records.append(averager.step())
            if step + 1 == stop_after:
                state = json.loads(json.dumps(averager.state_dict()))
                averager = Averager(population, rule, optimizers, num_steps=8)
                averager.load_state_dict(state)
        return population, records

    def test_the_state_is_a_copy(self) -> None:
        population = Population(make_networks("linear", 2))
        averager = Averager(population, Push(alpha=0.99), [sgd(network) for network in population])
        state = averager.state_dict()
        averager.step()
        assert state == {"num_steps_taken": 0, "num_averagings": 0, "highest_lrs": [0.1, 0.1]}

    def test_the_state_of_other_optimizers_is_refused(self) -> None:
        population = Population(make_networks("linear", 2))
        state = Averager(population, Push(alpha=0.99), [sgd(network) for network in population]).state_dict()
        with pytest.raises(MixingError, match="the state is of 2 optimizers, this averager has 0"):
            Averager(population, Push(alpha=0.99)).load_state_dict(state)


def test_a_state_from_before_a_member_was_dropped_brings_it_back() -> None:
    averager = Averager(Population(make_networks("linear", 3)), MergeAll(every_steps=1))
    before = averager.state_dict()
    averager.population.dropped = frozenset({2})
    after = averager.state_dict()
    averager.load_state_dict(before)
    assert averager.population.active == (0, 1, 2)
    averager.load_state_dict(after)
    assert averager.population.active == (0, 1)


def test_optimizers_of_other_networks_are_refused() -> None:
    nets = make_networks("linear", 2)
    optimizers = [optim.SGD(net.parameters(), lr=0.1) for net in nets]
    Averager(Population(nets), Push(alpha=0.9), optimizers)
    with pytest.raises(MixingError, match="optimizer 0 trains no parameter of any local member"):
        Averager(Population(copy.deepcopy(nets)), Push(alpha=0.9), optimizers)


def test_a_first_group_that_is_never_trained_is_reported() -> None:
    nets = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [
        optim.SGD([{"params": net[0].parameters(), "lr": 0.0}, {"params": net[1].parameters(), "lr": 0.1}])
        for net in nets
    ]
    averager = Averager(Population(nets), Push(alpha=0.9, every_steps=1), optimizers)
    with pytest.warns(UserWarning, match="has a learning rate of 0, which scales pushes to nothing"):
        averager.step()
    assert averager.step(lr_ratio=1.0).alpha == 0.9  # type: ignore[union-attr]


def test_pushes_that_the_schedule_scales_to_nothing_are_reported_once() -> None:
    population = Population(make_networks("linear", 2))
    optimizers = [optim.Adam(net.parameters(), lr=1.0) for net in population]
    for optimizer in optimizers:
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.001)
    averager = Averager(population, Push(alpha=0.5, every_steps=1), optimizers)
    for _ in range(19):
        averager.step()
    with pytest.warns(UserWarning, match=r"20 pushes were scaled down to about 0.001"):
        averager.step()
    averager.step()


def test_rates_that_begin_low_or_end_low_are_no_reason_to_warn() -> None:
    population = Population(make_networks("linear", 2))
    optimizers = [optim.SGD(net.parameters(), lr=1.0) for net in population]
    averager = Averager(population, Push(alpha=0.5, every_steps=1), optimizers)
    for step in range(60):
        averager.step(lr_ratio=0.01)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1.0 if step == 10 else 0.01
        averager.step()


def test_pushes_go_on_after_the_end_that_was_given() -> None:
    averager = Averager(Population(make_networks("linear", 2)), Push(alpha=0.5, every_steps=1), num_steps=2)
    averager.step()
    averager.step()
    with pytest.warns(PapaWarning, match=r"the half-life was set for that length.*Pass the real number of steps"):
        assert averager.step() is not None


def test_a_warm_up_is_not_reported_as_a_low_learning_rate() -> None:
    population = Population(make_networks("linear", 2))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in population]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one, max_lr=1.0, total_steps=400) for one in optimizers]
    averager = Averager(population, Push(alpha=0.5, every_steps=1), optimizers)
    for _ in range(60):
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        averager.step()


def test_training_that_goes_on_after_its_end_is_reported() -> None:
    averager = Averager(Population(make_networks("linear", 2)), MergeAll(every_steps=2), num_steps=4)
    assert [averager.step() is not None for _ in range(4)] == [False, True, False, False]
    with pytest.warns(UserWarning, match="training goes on after num_steps = 4"):
        averager.step()


def test_more_fragments_than_tensors_leave_some_turns_empty() -> None:
    population = Population([nn.Linear(3, 2) for _ in range(3)])
    averager = Averager(population, OuterStep(every_steps=8, fragments=8))
    is_changed = []
    for _ in range(8):
        before = population.matrix.clone()
        assert averager.step() is not None
        is_changed.append(not torch.equal(before, population.matrix))
    assert sum(is_changed) == 2
    assert (population.matrix == population.matrix[0]).all()


def test_a_share_of_nothing_changes_nothing() -> None:
    population = Population([nn.Linear(3, 2) for _ in range(3)])
    before = population.matrix.clone()
    assert Averager(population, SparseAverage(share=0.0)).step() is not None
    assert torch.equal(before, population.matrix)
