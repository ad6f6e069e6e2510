"""`papa.averaging` and `papa.join`: hooks on optimizers give the bits of a loop that calls the averager."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from papa import Averager, Averaging, MergeAll, PapaWarning, Population, Push, average_soup, averaging, join
from papa.attach import Joined, unwrapped
from papa.core.group import LocalGroup
from papa.errors import ConfigError, MixingError

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()


def make_members(size: int = 3) -> list[nn.Module]:
    nets: list[nn.Module] = []
    for member in range(size):
        torch.manual_seed(member)
        nets.append(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    return nets


def make_optimizers(nets: list[nn.Module]) -> list[optim.Optimizer]:
    return [optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]


def loss_of(net: nn.Module, member: int, step: int) -> Tensor:
    batch = torch.randint(64, (16,), generator=torch.Generator().manual_seed(100 * member + step))
    return F.cross_entropy(net(INPUTS[batch]), TARGETS[batch])


def weights_of(nets: list[nn.Module]) -> Tensor:
    return torch.stack([nn.utils.parameters_to_vector(net.parameters()).detach() for net in nets])


def loop(
    nets: list[nn.Module],
    optimizers: list[Any],
    num_steps: int = 12,
    *,
    after: Callable[[], object] = lambda: None,
    are_schedules_inside: bool = False,
) -> Tensor:
    """Train with a schedule and two batches per step; schedules step with their optimizers, or together."""
    schedules = [optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps) for optimizer in optimizers]
    for step in range(num_steps):
        for member, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for part in range(2):
                (loss_of(net, member, 2 * step + part) / 2).backward()
            optimizer.step()
            if are_schedules_inside:
                schedules[member].step()
        after()
        for schedule in () if are_schedules_inside else schedules:
            schedule.step()
    return weights_of(nets)


@pytest.mark.parametrize("are_schedules_inside", [False, True])
@pytest.mark.parametrize("rule", [Push(half_life=0.2), MergeAll(every_steps=4)], ids=["push", "merge"])
def test_hooks_give_the_bits_of_a_loop_that_calls_the_averager(rule: Any, are_schedules_inside: bool) -> None:
    nets = make_members()
    optimizers = make_optimizers(nets)
    averager = Averager(Population(nets), rule, optimizers, num_steps=12)
    expected = loop(nets, optimizers, after=averager.step)
    others = make_members()
    theirs = make_optimizers(others)
    log: list[Averaging] = []
    with averaging(others, theirs, rule, num_steps=12, on_averaging=log.append) as joined:
        found = loop(others, theirs, are_schedules_inside=are_schedules_inside)
    assert torch.equal(found, expected)
    assert joined.averager.num_averagings == averager.num_averagings == len(log) > 0
    assert joined.last == log[-1]
    assert torch.equal(weights_of([joined.soup()]), weights_of([average_soup(others)]))
    found_soup = joined.soup_tensors()
    assert all(torch.equal(found_soup[name], tensor) for name, tensor in joined.soup().state_dict().items())


class Wrapper:
    """As AcceleratedOptimizer and LightningOptimizer wrap an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


class Accelerated(optim.Optimizer):
    """Is a subclass, but never initialised as one."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Transparent(optim.Optimizer):
    """As LightningOptimizer and Fabric's wrapper: of the optimizer's class, and passes its attributes on."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> optim.Optimizer:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Complete(optim.SGD):
    """An optimizer with hooks of its own that uses another one, such as Lookahead."""

    def __init__(self, params: Any) -> None:
        weights = list(params)
        self.optimizer = optim.SGD(weights, lr=0.1)
        super().__init__(weights, lr=0.1)


def test_only_wrappers_without_hooks_are_unwrapped() -> None:
    (net,) = make_members(1)
    inner = optim.SGD(net.parameters(), lr=0.1)
    assert unwrapped(Accelerated(inner)) is inner
    assert unwrapped(Transparent(inner)) is inner
    complete = Complete(net.parameters())
    assert unwrapped(complete) is complete


def test_wrapped_optimizers_are_unwrapped() -> None:
    nets = make_members()
    optimizers = make_optimizers(nets)
    with averaging(nets, [Wrapper(Wrapper(one)) for one in optimizers], Push(alpha=0.9, every_steps=2)) as joined:  # type: ignore[misc]
        loop(nets, optimizers)
    assert joined.averager.num_averagings == 6
    with pytest.raises(MixingError, match=r"an optimizer is a Linear, expected a torch.optim.Optimizer"):
        averaging(nets, [nn.Linear(1, 1)], Push(alpha=0.9))  # type: ignore[list-item]
    with pytest.raises(MixingError, match="there is no optimizer, expected one for each member"):
        averaging(nets, [], Push(alpha=0.9))


def test_one_optimizer_for_all_members() -> None:
    nets = make_members()
    optimizer = optim.SGD([{"params": net.parameters()} for net in nets], lr=0.1)
    with averaging(nets, optimizer, Push(alpha=0.9, every_steps=2)) as joined:
        for step in range(4):
            torch.stack([loss_of(net, member, step) for member, net in enumerate(nets)]).sum().backward()
            optimizer.step()
    assert joined.averager.num_steps_taken == 4


def test_a_step_that_a_scaler_skips_counts_for_all() -> None:
    nets = make_members(2)
    optimizers = make_optimizers(nets)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in nets]
    with averaging(nets, optimizers, Push(alpha=0.5, every_steps=1)) as joined:
        for step in range(6):
            for member, (net, optimizer, scaler) in enumerate(zip(nets, optimizers, scalers, strict=True)):
                optimizer.zero_grad()
                loss = loss_of(net, member, step)
                scaler.scale(loss * float("inf") if (member, step) == (1, 2) else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            assert joined.averager.num_steps_taken == step + 1
    assert scalers[1].get_scale() == 2.0  # it did skip a step


def test_members_that_train_one_after_the_other_are_reported() -> None:
    nets = make_members(2)
    optimizers = make_optimizers(nets)
    with (
        averaging(nets, optimizers, Push(alpha=0.9, every_steps=2)),
        pytest.warns(PapaWarning, match="2 steps ahead of another: let members take their steps in turn"),
    ):
        loop(nets[:1], optimizers[:1])


def test_state_continues_where_it_was() -> None:
    rule = Push(half_life=0.2, every_steps=3)
    nets = make_members()
    optimizers = make_optimizers(nets)
    joined = averaging(nets, optimizers, rule, num_steps=24)
    loop(nets, optimizers, 10)
    twins = copy.deepcopy(nets)
    theirs = make_optimizers(twins)
    for one, other in zip(theirs, optimizers, strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    resumed = averaging(twins, theirs, rule, num_steps=24)
    resumed.load_state_dict(joined.state_dict())
    assert torch.equal(loop(twins, theirs, 6), loop(nets, optimizers, 6))
    assert resumed.averager.num_steps_taken == 16


def test_a_training_that_is_far_shorter_than_planned_is_warned_of_once() -> None:
    def train(num_steps: int, planned: int) -> Joined:
        nets = make_members()
        joined = averaging(nets, optimizers := make_optimizers(nets), Push(half_life=0.01), num_steps=planned)
        loop(nets, optimizers, num_steps)
        return joined

    joined = train(50, 101)
    message = r"ended after 50 of num_steps = 101, .*a half-life, .*weaker than asked for. Pass the number of optimizer"
    with pytest.warns(PapaWarning, match=message):
        joined.close()
    joined.close()
    train(50, 100).close()
    train(12, 100).close()  # a trial
    train(50, 101).close(early=True)
    with pytest.raises(KeyboardInterrupt), train(50, 101):
        raise KeyboardInterrupt


def test_closed_members_are_left_alone_and_forgotten() -> None:
    nets = make_members()
    optimizers = make_optimizers(nets)
    joined = averaging(nets, optimizers, Push(alpha=0.9, every_steps=2))
    joined.close()
    loop(nets, optimizers, 4)
    assert joined.averager.num_steps_taken == 0
    reference = weakref.ref(joined)
    del joined
    gc.collect()
    assert reference() is None


def test_a_member_of_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """With a group of one process; several are in tests/test_member.py."""
    (net,) = make_members(1)
    (optimizer,) = make_optimizers([net])
    with pytest.raises(ConfigError, match=r"not one of several members: start it with torchrun"):
        join(net, optimizer, Push(alpha=0.9))
    monkeypatch.setenv("PAPA_WEIGHTS", str(tmp_path / "weights"))
    join(net, optimizer, Push(half_life=0.2), num_steps=12, group=LocalGroup())
    loop([net], [optimizer])
    found = load_file(tmp_path / "weights" / "0.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())
