"""Accelerate itself: several prepared models in one process, accumulation, mixed precision, checkpoints, one member."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import papa
from papa.core.group import LocalGroup
from papa.errors import ConfigError
from papa.integrations.accelerate import PopulationAveraging

RULE = papa.Push(half_life=0.1, every_steps=3)
NUM_MEMBERS, NUM_EPOCHS, ACCUMULATION = 2, 3, 2
BATCHES_PER_EPOCH = 7
"""Odd, so that the last step of an epoch accumulates one batch only."""
STEPS_PER_EPOCH = 4


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def make_parts() -> tuple[list[nn.Module], list[Any], list[Any], list[Any]]:
    inputs = torch.randn(8 * BATCHES_PER_EPOCH, 6, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
    models = list(
        papa.Population.build(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), NUM_MEMBERS
        )
    )
    models = [copy.deepcopy(model) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    loaders = papa.loaders(dataset, members=NUM_MEMBERS, batch_size=8, drop_last=False)
    total = NUM_EPOCHS * STEPS_PER_EPOCH
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, 0.02, total_steps=total + 1) for one in optimizers]
    return models, optimizers, loaders, schedulers


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain_loop() -> tuple[list[nn.Module], papa.Joined]:
    """The same training without Accelerate."""
    models, optimizers, loaders, schedulers = make_parts()
    joined = papa.averaging(models, optimizers, RULE, num_steps=NUM_EPOCHS * STEPS_PER_EPOCH)
    for _ in range(NUM_EPOCHS):
        for number, batches in enumerate(zip(*loaders, strict=True)):
            is_step = (number + 1) % ACCUMULATION == 0 or number + 1 == BATCHES_PER_EPOCH
            for model, optimizer, scheduler, batch in zip(models, optimizers, schedulers, batches, strict=True):
                (loss_of(model, batch) / ACCUMULATION).backward()
                if is_step:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    joined.close()
    return models, joined


class Training:
    """The loop of Accelerate's examples, for several models."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, **options)
        parts = ([self.accelerator.prepare(one) for one in these] for these in make_parts())
        self.models, self.optimizers, self.loaders, self.schedulers = parts
        num_steps = NUM_EPOCHS * STEPS_PER_EPOCH
        self.averaging = PopulationAveraging(
            self.accelerator, self.models, self.optimizers, RULE, num_steps=num_steps, loaders=self.loaders
        )

    def run(self, num_epochs: int) -> None:
        for _ in range(num_epochs):
            for batches in zip(*self.loaders, strict=True):
                with self.accelerator.accumulate(*self.models):
                    members = zip(self.models, self.optimizers, self.schedulers, batches, strict=True)
                    for model, optimizer, scheduler, batch in members:
                        self.accelerator.backward(loss_of(model, batch))
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()


def are_equal(first: list[nn.Module], second: list[nn.Module]) -> bool:
    states = zip((net.state_dict() for net in first), (net.state_dict() for net in second), strict=True)
    return all(torch.equal(one[name], tensor) for one, other in states for name, tensor in other.items())


def test_members_have_the_bits_of_the_plain_loop() -> None:
    expected, joined = plain_loop()
    training = Training()
    with training.averaging as averaging:
        training.run(NUM_EPOCHS)
    assert averaging.averager.num_steps_taken == NUM_EPOCHS * STEPS_PER_EPOCH
    assert averaging.averager.num_averagings == joined.averager.num_averagings == 4
    assert are_equal(training.models, expected)
    assert are_equal([averaging.soup()], [joined.soup()])
    training.run(1)
    assert averaging.averager.num_steps_taken == NUM_EPOCHS * STEPS_PER_EPOCH, "closed by the end of `with`"


def test_a_state_that_accelerate_saved_continues_with_the_bits_of_an_unbroken_run(tmp_path: Path) -> None:
    unbroken = Training()
    unbroken.run(1)
    unbroken.accelerator.save_state(tmp_path)
    unbroken.run(2)
    AcceleratorState._reset_state()
    resumed = Training()
    resumed.accelerator.load_state(tmp_path)
    assert resumed.averaging.averager.num_steps_taken == STEPS_PER_EPOCH
    resumed.run(2)
    assert are_equal(resumed.models, unbroken.models)
    assert resumed.averaging.averager.state_dict() == unbroken.averaging.averager.state_dict()
    other = PopulationAveraging(resumed.accelerator, resumed.models, resumed.optimizers, RULE, num_steps=1)
    with pytest.raises(ConfigError, match="the state has the orders of 2 loaders, got 0: pass the same loaders"):
        other.load_state_dict(unbroken.averaging.state_dict())


def test_the_soup_of_mixed_precision_is_a_plain_network(tmp_path: Path) -> None:
    training = Training(mixed_precision="bf16")
    with training.averaging as averaging:
        training.run(1)
    soup = averaging.soup()
    assert "autocast" not in repr(soup.forward)
    outputs = soup(torch.randn(4, 6))
    assert outputs.dtype == torch.float32
    torch.save(soup, tmp_path / "soup.pt")


def test_one_model_is_a_member_of_its_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a group of one process; several are in test_examples.py."""
    monkeypatch.setenv("PAPA_WEIGHTS", str(tmp_path))
    accelerator = Accelerator(cpu=True)
    models, optimizers, *_ = make_parts()
    model, optimizer = accelerator.prepare(models[0], optimizers[0])
    with pytest.raises(ConfigError, match="not one of several members: start it with torchrun"):
        PopulationAveraging(accelerator, model, optimizer, RULE, num_steps=1)
    with PopulationAveraging(accelerator, model, optimizer, RULE, num_steps=1, group=LocalGroup()) as averaging:
        accelerator.backward(loss_of(model, [torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)]))
        optimizer.step()
    assert averaging.averager.num_steps_taken == 1
    assert (tmp_path / "0.safetensors").exists()
    monkeypatch.setattr(type(accelerator), "num_processes", 4)
    with pytest.raises(ConfigError, match="trains one network in 4 processes: its copies are no members"):
        PopulationAveraging(accelerator, model, optimizer, RULE, num_steps=1)


def test_members_can_train_independently() -> None:
    training = Training()
    averaging = PopulationAveraging(
        training.accelerator, training.models, training.optimizers, RULE, num_steps=99, enabled=False
    )
    training.run(1)
    assert averaging.averager.num_steps_taken == 0
    assert averaging.soup() is not None
