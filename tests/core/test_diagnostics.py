"""Mistakes of a loop are warned of once, with the remedy; right loops are not."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from papa import Averager, MergeAll, PapaWarning, Population, Push, Rule, average_soup, train

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make_members(size: int = 3, *, alike: bool = False) -> list[nn.Module]:
    nets: list[nn.Module] = []
    for member in range(size):
        torch.manual_seed(0 if alike else member)
        nets.append(make_net())
    return nets


def sgd(population: Population, lr: float = 0.1) -> list[optim.Optimizer]:
    return [optim.SGD(net.parameters(), lr=lr) for net in population]


def own_batch(member: int, step: int) -> Tensor:
    return torch.randint(64, (16,), generator=torch.Generator().manual_seed(100 * member + step))


def train_step(
    population: Population,
    optimizers: list[optim.Optimizer],
    step: int,
    batch: Callable[[int, int], Tensor] = own_batch,
) -> None:
    for member, (net, optimizer) in enumerate(zip(population, optimizers, strict=True)):
        indices = batch(member, step)
        optimizer.zero_grad()
        F.cross_entropy(net(INPUTS[indices]), TARGETS[indices]).backward()
        optimizer.step()


def run(
    averager: Averager,
    optimizers: list[optim.Optimizer],
    num_steps: int,
    *,
    change_lr: Callable[[], object] = lambda: None,
    num_extra_steps: int = 0,
    **options: Any,
) -> None:
    for step in range(num_steps):
        train_step(averager.population, optimizers, step, **options)
        change_lr()
        for _ in range(1 + num_extra_steps):
            averager.step()


def loop(rule: Rule, num_steps: int = 30, *, alike: bool = False, **options: Any) -> None:
    population = Population(make_members(alike=alike))
    optimizers = sgd(population)
    run(Averager(population, rule, optimizers), optimizers, num_steps, **options)


def test_a_right_loop_warns_of_nothing() -> None:
    population = Population(make_members())
    optimizers = sgd(population)
    averager = Averager(population, Push(half_life=0.05), optimizers, num_steps=40)
    run(averager, optimizers, 40)
    average_soup(population, score=lambda net: -F.cross_entropy(net(INPUTS), TARGETS).item())


def test_a_half_life_too_long_for_the_training() -> None:
    population = Population(make_members())
    with pytest.warns(PapaWarning, match=r"half-life of 690 steps, 115% of the training, in a training of 600 steps"):
        Averager(population, Push(alpha=0.99, every_steps=10), num_steps=600)
    Averager(population, Push(alpha=0.99, every_steps=10), num_steps=230_000)
    with pytest.warns(PapaWarning, match=r"MergeAll averages every 90 steps, so never in a training of 60"):
        Averager(population, MergeAll(every_steps=90), num_steps=60)
    Averager(population, MergeAll(every_steps=90), num_steps=20)  # a trial


def test_members_that_start_alike_may_have_long_half_lives() -> None:
    Averager(Population(make_members(alike=True)), Push(half_life=0.3), num_steps=100)


def test_where_the_length_is_not_known_the_soup_warns() -> None:
    population = Population(make_members())
    averager = Averager(population, Push(alpha=0.99, every_steps=10), sgd(population))
    for _ in range(60):
        averager.step()
    with pytest.warns(PapaWarning, match="half-life of 690 steps, 1149% of the training, in a training of 60 steps"):
        average_soup(population)
    average_soup(population)  # once
    del averager
    gc.collect()
    average_soup(population)


def test_a_soup_far_worse_than_its_members() -> None:
    members = make_members()
    scores = {id(net): 99.0 - index for index, net in enumerate(members)}
    with pytest.warns(PapaWarning, match=r"average soup scores 33, far worse than its members \(98 on average\)"):
        average_soup(members, score=lambda net: scores.get(id(net), 33.0))
    average_soup(members, score=lambda net: scores.get(id(net), 33.0), higher_is_better=False)
    average_soup(members, score=lambda net: scores.get(id(net), 96.0))


def test_train_warns_of_a_soup_far_worse_than_its_members() -> None:
    """Each learns one of two opposite signs, whose mean is nothing."""
    options: dict[str, Any] = {"num_members": 4, "num_epochs": 20, "batch_size": 8, "validation": 0.5}
    with (
        pytest.warns(PapaWarning, match="averages every 5000 steps, so never"),
        pytest.warns(PapaWarning, match="far worse than its members"),
    ):
        train(Signs, (INPUTS, INPUTS[:, :1]), rule=MergeAll(every_steps=5000), loss=F.mse_loss, metric=fit, **options)


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()).sign() * torch.rand(()).add(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * self.weight.abs()


def fit(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1.0 - F.mse_loss(outputs, targets)


def test_identical_members() -> None:
    with (
        pytest.warns(PapaWarning, match="all members are identical .* its own seed and its own order of the data"),
        pytest.warns(PapaWarning, match="all members saw the same 3 first batches"),
    ):
        loop(Push(alpha=0.9, every_steps=4), alike=True, batch=lambda member, step: own_batch(0, step))


@pytest.mark.parametrize("every_steps", [1, 2, 4])
def test_identical_batches(every_steps: int) -> None:
    with pytest.warns(PapaWarning, match=r"all members saw the same 3 first batches, .* papa\.loaders") as found:
        loop(Push(alpha=0.9, every_steps=every_steps), batch=lambda member, step: own_batch(0, step))
    assert len(found) == 1


def test_members_that_are_watched_can_be_pickled_and_are_left_as_found() -> None:
    population = Population(make_members())
    averager = Averager(population, Push(alpha=0.9, every_steps=4), sgd(population))
    pickle.loads(pickle.dumps(population[0]))
    for step in range(4):
        train_step(population, sgd(population), step)
    assert all(not net._forward_pre_hooks for net in population)
    del averager


def test_an_averager_that_steps_more_often_than_optimizers() -> None:
    with pytest.warns(PapaWarning, match=r"called 20 times, while each optimizer took 7 steps: call it once after all"):
        loop(Push(alpha=0.9, every_steps=5), 20, num_extra_steps=2)


def test_optimizers_of_some_members_only() -> None:
    population = Population(make_members())
    with pytest.warns(PapaWarning, match=r"no optimizer of member 1, 2, only 1 of others: pass the optimizers of all"):
        Averager(population, Push(alpha=0.9), sgd(population)[:1])


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_schedule_that_the_averager_does_not_see(by_hand: bool) -> None:
    population = Population(make_members())
    optimizers = sgd(population)
    schedules = [] if by_hand else [optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for optimizer in optimizers]

    def change_lr() -> None:
        for schedule in schedules:
            schedule.step()
        for optimizer in optimizers if by_hand else ():
            optimizer.param_groups[0]["lr"] *= 0.9

    averager = Averager(population, Push(alpha=0.9, every_steps=2))
    with pytest.warns(PapaWarning, match="learning rates change, but the averager has no optimizers") as found:
        run(averager, optimizers, 10, change_lr=change_lr)
    assert len(found) == 1


class MasterWeights(optim.SGD):
    """Steps on its own copies of the weights, as mixed-precision optimizers do."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.weights = list(params)
        super().__init__([weight.detach().clone() for weight in self.weights], **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        masters = self.param_groups[0]["params"]
        for master, weight in zip(masters, self.weights, strict=True):
            master.grad = weight.grad
        super().step(closure)
        with torch.no_grad():
            for master, weight in zip(masters, self.weights, strict=True):
                weight.copy_(master)


def test_pushes_that_the_next_step_undoes() -> None:
    population = Population(make_members())
    optimizers: list[optim.Optimizer] = [MasterWeights(net.parameters(), lr=0.01) for net in population]
    averager = Averager(population, Push(alpha=0.5, every_steps=3))
    with pytest.warns(PapaWarning, match="the step after each averaging undid it"):
        run(averager, optimizers, 15)


class Averaged(optim.SGD):
    """Keeps an average of its weights, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("z", parameter.detach().clone()).lerp_(parameter.detach(), 0.1)


def test_optimizers_that_keep_averages_of_the_weights() -> None:
    population = Population(make_members())
    optimizers: list[optim.Optimizer] = [Averaged(net.parameters(), lr=0.01) for net in population]
    averager = Averager(population, Push(alpha=0.95, every_steps=3), optimizers)
    with pytest.warns(PapaWarning, match=r"Averaged keeps a copy or an average of the weights \('z'\)"):
        run(averager, optimizers, 6)
    adam: list[optim.Optimizer] = [optim.AdamW(net.parameters(), lr=0.01) for net in population]
    run(Averager(population, Push(alpha=0.95, every_steps=3), adam), adam, 6)
