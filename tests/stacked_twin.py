"""The stacked engine beside its slow and obvious twin, the loop: for tests of the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import make_training
from papa import Push
from papa.training import Callback, Numerics, Stacked, Training
from papa.training.checkpoint import CheckpointWriter, Expected, load_checkpoint
from papa.training.data import Data, as_source
from papa.training.schedules import cosine
from papa.training.state import load_state_, member_states, shared_state


def with_batch_norm() -> nn.Module:
    # A bias before BatchNorm has a gradient of rounding errors, which Adam would turn into steps of full length.
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.GELU(),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def make_data(num_examples: int = 240) -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_examples, 4, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    parts = [as_source((inputs[start::3], targets[start::3])) for start in range(3)]
    return Data(train=parts[0], validation=parts[1], test=parts[2])


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def build(make_net: Callable[[], nn.Module], *, stacked: bool, **changes: Any) -> Training:
    options: dict[str, Any] = {
        "num_members": 3,
        "num_epochs": 2,
        "batch_size": 8,
        "rule": Push(alpha=0.8, every_steps=3),
        "loss": F.cross_entropy,
        "metric": lambda outputs, targets: (outputs.argmax(1) == targets).double().mean(),
        "make_optimizer": sgd,
        "schedule": cosine(0.1),
        "augment": None,
        "prepare": lambda inputs: inputs * 2.0 - 0.1,
        "seed": 1,
        "device": "cpu",
        "numerics": Numerics(),
        "eval_batch_size": 64,
        "group": None,
        "engine": Stacked if stacked else None,
    }
    return make_training(make_net, changes.pop("data", make_data()), **{**options, **changes})


def assert_same_members(first: Training, second: Training, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for net, other in zip(first.population, second.population, strict=True):
        for (name, value), expected in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(
                value, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


class Steps(Callback):
    """Keeps the members' tensors of every step, and the losses of every epoch."""

    def __init__(self) -> None:
        self.tensors: list[list[dict[str, Tensor]]] = []
        self.losses: list[list[float]] = []

    def on_step_end(self, training: Training) -> None:
        self.tensors.append([copy.deepcopy(net.state_dict()) for net in training.population])

    def on_epoch_end(self, training: Training, record: Any) -> None:
        self.losses.append(record.losses)


def assert_stacked_is_the_loop(
    make_net: Callable[[], nn.Module], callbacks: Callable[[], Sequence[Callback]] = list, **changes: Any
) -> Training:
    """Train with both engines, and compare after every step; returns the stacked training."""
    tolerance = {"rtol": 1e-4, "atol": 1e-5} | changes.pop("tolerance", {})
    loop, stacked = Steps(), Steps()
    for watch in (loop, stacked):
        training = build(make_net, stacked=watch is stacked, **changes)
        start = copy.deepcopy(training.population[0].state_dict())
        training.run([*callbacks(), watch])
    assert any(not torch.equal(start[name], value) for name, value in training.population[0].state_dict().items())
    for step, (found, expected) in enumerate(zip(stacked.tensors, loop.tensors, strict=True)):
        for member, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, value in ours.items():
                where = f"step {step}, member {member}, {name}"
                torch.testing.assert_close(
                    value, theirs[name], **tolerance, msg=lambda text, where=where: f"{where}: {text}"
                )
    torch.testing.assert_close(torch.tensor(stacked.losses), torch.tensor(loop.losses), **tolerance)
    return training


class StopError(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step: int, directory: Path) -> None:
        self.step, self.directory = step, directory

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.step:
            self.directory.mkdir()
            writer = CheckpointWriter(self.directory, group=training.group, num_members=training.population.size)
            writer.save(training.step, member_states(training), shared_state(training), flush=lambda: None)
            assert writer.settle() is None
            raise StopError


def resumed(make: Callable[[bool], Training], *, first: bool, then: bool, stop_at: int, directory: Path) -> Training:
    with pytest.raises(StopError):
        make(first).run([StopAt(stop_at, directory)])
    training = make(then)
    expected = {
        member: Expected(model, optimizer)
        for member, model, optimizer in zip(training.members, training.population, training.optimizers, strict=True)
    }
    found = load_checkpoint(directory / f"step-{stop_at:08d}", expected, num_members=training.population.size)
    load_state_(training, found.step, found.state, found.members)
    training.run()
    return training
