from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers import assert_same_bits
from papa.core.rules import MergeAll
from papa.errors import ConfigError
from papa.training import Callback, Training, TrajectoryAverage, train


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs.sum(dim=1) > 0).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


class Diary(Callback):
    """Every state of every member, step by step."""

    def __init__(self) -> None:
        self.states: list[list[dict[str, Tensor]]] = []

    def on_step_complete(self, training: Training) -> None:
        self.states.append([copy.deepcopy(model.state_dict()) for model in training.population])


def run(*callbacks: Callback) -> Diary:
    diary = Diary()
    train(
        network,
        data(),
        num_members=2,
        num_epochs=6,
        batch_size=20,
        validation=0.2,
        rule=MergeAll(every_steps=8),
        callbacks=[*callbacks, diary],
    )
    return diary


PARAMETERS = [name for name, _ in network().named_parameters()]
STEPS_PER_EPOCH = 4


def test_swa_is_the_mean_of_the_weights_after_each_epoch_from_its_start() -> None:
    average = TrajectoryAverage(start=0.5)
    states = run(average).states
    for member, found in enumerate(average.networks):
        taken = [states[STEPS_PER_EPOCH * epoch - 1][member] for epoch in (3, 4, 5, 6)]
        assert average.num_averaged(member) == 4
        for name in PARAMETERS:
            expected = torch.stack([state[name] for state in taken]).double().mean(dim=0)
            torch.testing.assert_close(found.state_dict()[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_ema_is_the_recursion() -> None:
    average = TrajectoryAverage(decay=0.9)
    states = run(average).states
    for member, found in enumerate(average.networks):
        taken = [state[member] for state in states]
        for name in PARAMETERS:
            expected = taken[0][name].double()
            for state in taken[1:]:
                expected = 0.9 * expected + 0.1 * state[name]
            torch.testing.assert_close(found.state_dict()[name].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [network, lambda: nn.Linear(4, 2)], ids=["with buffers", "without buffers"])
def test_ema_has_the_bits_of_torchs_own(make: Callable[[], nn.Module]) -> None:
    class Twin(Callback):
        def setup(self, training: Training) -> None:
            self.averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for net in training.population]

        def on_step_end(self, training: Training) -> None:
            for average, net in zip(self.averages, training.population, strict=True):
                average.update_parameters(net)

    average, twin = TrajectoryAverage(decay=0.9), Twin()
    train(make, data(), num_members=2, num_epochs=2, batch_size=20, callbacks=[average, twin])
    for member, expected in enumerate(twin.averages):
        assert_same_bits(average.networks[member].state_dict(), expected.module.state_dict())
        assert average.num_averaged(member) == int(expected.n_averaged)


def test_it_leaves_training_alone() -> None:
    for found, expected in zip(run(TrajectoryAverage()).states[-1], run().states[-1], strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"decay": -0.1}, {"start": 1.0}])
def test_it_refuses_numbers_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        TrajectoryAverage(**wrong)
