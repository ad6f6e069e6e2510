"""Stacked members are the loop, to float tolerance; their slow and obvious twin is the loop itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import assert_same_bits, execute, make_training, small_data
from papa import Independent, MergeAll, MergePairs, Push, train
from papa.errors import ConfigError, DataError
from papa.lab.config import Config
from papa.lab.recipes import find
from papa.training import Align, Callback, CheckpointOptions, Numerics, Stacked, Training
from papa.training.data import Data
from papa.training.schedules import cosine


def linear() -> nn.Module:
    return nn.Linear(4, 3)


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


class Tied(nn.Module):
    """One matrix in two places, a parameter of no dimension, one that nothing uses, and a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.scale, self.unused = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(5))
        self.register_buffer("mask", torch.tensor([1.0, 0.5, 1.0, 2.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(inputs)) * self.mask)
        return self.head(hidden) * self.scale


def with_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


NETWORKS = [linear, with_batch_norm, convolutional, with_layer_norm, Tied]


def build(make_net: Callable[[], nn.Module], *, engine: Any = Stacked, **changes: Any) -> Training:
    options: dict[str, Any] = {
        "num_members": 3,
        "num_epochs": 2,
        "batch_size": 8,
        "rule": Push(alpha=0.8, every_steps=3),
        "make_optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
        "schedule": cosine(0.1),
        "prepare": lambda inputs: inputs * 2.0 - 0.1,
        "engine": engine,
    }
    return make_training(make_net, changes.pop("data", small_data()), **{**options, **changes})


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
    make_net: Callable[[], nn.Module],
    callbacks: Callable[[], Sequence[Callback]] = list,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **changes: Any,
) -> Training:
    """Train with both engines, and compare after every step; returns the stacked training."""
    found = []
    for engine in (None, Stacked):
        training, steps = build(make_net, engine=engine, **changes), Steps()
        start = copy.deepcopy(training.population[0].state_dict())
        training.run([*callbacks(), steps])
        found.append(steps)
    assert any(not torch.equal(start[name], value) for name, value in training.population[0].state_dict().items())
    loop, stacked = found
    torch.testing.assert_close(stacked.tensors, loop.tensors, rtol=rtol, atol=atol)
    torch.testing.assert_close(stacked.losses, loop.losses, rtol=rtol, atol=atol)
    return training


@pytest.mark.parametrize("make_net", NETWORKS)
def test_stacked_members_end_where_the_loops_do(make_net: Callable[[], nn.Module]) -> None:
    assert_stacked_is_the_loop(make_net)


def test_batch_size_one() -> None:
    assert_stacked_is_the_loop(linear, batch_size=1, rule=lambda training: MergeAll(every_steps=training.steps_in(1)))


def test_running_statistics_and_their_counter_follow() -> None:
    training = assert_stacked_is_the_loop(with_batch_norm, rule=Independent())
    norm = training.population[2][1]  # type: ignore[index]
    assert norm.num_batches_tracked == training.length.num_steps
    assert norm.running_mean.abs().min() > 0


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "nesterov": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=0.01),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.01),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5, centered=True),
    "two groups": lambda net: torch.optim.SGD(
        [{"params": list(net.parameters())[:2]}, {"params": list(net.parameters())[2:], "lr": 0.01}], lr=0.05
    ),
    "part of the network": lambda net: torch.optim.SGD(list(net.parameters())[2:], lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer(name: str) -> None:
    assert_stacked_is_the_loop(with_batch_norm, make_optimizer=OPTIMIZERS[name])


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - F.one_hot(targets, 3)).square().mean()


def some_left_out(inputs: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return inputs, torch.where(inputs[:, 0] > 0.5, -100, targets)


def soft(inputs: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return inputs + torch.randn(inputs.shape, generator=generator), F.one_hot(targets, 3).float()


@pytest.mark.parametrize(
    "changes",
    [
        {"numerics": Numerics(clip_norm=0.5)},
        {"numerics": Numerics(channels_last=True)},
        {"loss": half_squares},
        {"augment": soft},
        {"augment": some_left_out},
    ],
    ids=["clipping is by member", "channels last", "own loss", "soft targets", "targets that are left out"],
)
def test_what_a_step_computes(changes: dict[str, Any]) -> None:
    assert_stacked_is_the_loop(convolutional, **changes)


@pytest.mark.parametrize("make_net", NETWORKS[2:])  # vmap refuses BatchNorm1d in bfloat16
def test_bfloat16(make_net: Callable[[], nn.Module]) -> None:
    half = Numerics(autocast=torch.bfloat16)
    assert_stacked_is_the_loop(make_net, numerics=half, num_epochs=1, rtol=0.03, atol=0.03)


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset with a random transform that draws from the global generator."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) / 60 + torch.randn(4), torch.tensor(index % 3)


def test_datasets_with_random_transforms() -> None:
    data = Data(train=Noisy(), validation=small_data().validation)  # type: ignore[arg-type]
    assert_stacked_is_the_loop(linear, data=data)


class Thaw(Callback):
    """Freezes the first layer of all members, with its BatchNorm, until half of the training is done."""

    def on_step_begin(self, training: Training) -> None:
        for net in training.population:
            is_thawed = training.step >= training.length.num_steps // 2
            for layer in list(net.children())[:2]:
                layer.requires_grad_(is_thawed).train(is_thawed)


class ToChannelsLast(Callback):
    """Brings all members into another memory order in the middle of training, so that the matrix is laid out anew."""

    def on_step_begin(self, training: Training) -> None:
        if training.step == 5:
            for net in training.population:
                net.to(memory_format=torch.channels_last)
            training.population.refresh_()


def test_what_callbacks_change_is_followed() -> None:
    assert_stacked_is_the_loop(with_batch_norm, callbacks=lambda: [Thaw()], numerics=Numerics(clip_norm=0.1))
    assert_stacked_is_the_loop(convolutional, callbacks=lambda: [ToChannelsLast()])


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_momenta_are_aligned_with_the_weights(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    pairs = MergePairs(every_steps=4)
    assert_stacked_is_the_loop(with_batch_norm, make_optimizer=optimizer, rule=pairs, align=Align(by="weights"))


class StopError(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.step:
            raise StopError


@pytest.mark.parametrize("name", ["rmsprop", "nesterov", "adam"])
def test_stopped_and_resumed_is_never_stopped_also_across_engines(name: str, tmp_path: Path) -> None:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))

    def trained(first: Any, then: Any, directory: str) -> list[nn.Module]:
        for engine, callbacks in ((first, [StopAt(14)]), (then, [])):
            try:
                outcome = train(
                    with_batch_norm,
                    (inputs, inputs.argmax(1) % 3),
                    num_members=3,
                    num_epochs=3,
                    batch_size=8,
                    make_optimizer=OPTIMIZERS[name],
                    validation=0.2,
                    engine=engine,
                    callbacks=callbacks if directory else [],
                    checkpoints=CheckpointOptions(tmp_path / directory, background=False) if directory else None,
                    device="cpu",
                )
            except StopError:
                assert callbacks
        return list(outcome.population)

    whole = [net.state_dict() for net in trained(Stacked, Stacked, "")]
    for net, expected in zip(trained(Stacked, Stacked, "same"), whole, strict=True):
        assert_same_bits(net.state_dict(), expected)
    for first, then in ((Stacked, None), (None, Stacked)):
        other = [net.state_dict() for net in trained(first, then, f"{first}")]
        torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-5)


def test_optimizers_have_their_state_again_after_training() -> None:
    found = []
    for engine in (None, Stacked):
        training = build(linear, engine=engine, make_optimizer=OPTIMIZERS["adam"])
        training.run()
        for net, optimizer in zip(training.population, training.optimizers, strict=True):
            for state in optimizer.state.values():
                assert all(value.untyped_storage().nbytes() <= 4 * value.numel() for value in state.values())
            optimizer.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            assert {int(state["step"]) for state in optimizer.state.values()} == {training.length.num_steps + 1}
        found.append([net.state_dict() for net in training.population])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def config_of(**changes: Any) -> Config:
    config = find("digits").config()
    config = replace(config, members=3, diversity=replace(config.diversity, grid="none"))
    return replace(config, train=replace(config.train, epochs=1, batch_size=32, **changes))


def test_workers_stack_their_own_members(tmp_path: Path) -> None:
    one = execute(config_of(engine="stacked"), tmp_path / "one", workers=1)
    two = execute(config_of(engine="stacked"), tmp_path / "two", workers=2)
    loop = execute(config_of(), tmp_path / "loop", workers=1)
    for other in (two, loop):
        losses = torch.tensor(other["test"]["loss"]["members"])
        torch.testing.assert_close(losses, torch.tensor(one["test"]["loss"]["members"]), rtol=1e-2, atol=1e-3)


class Decides(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if outputs.sum() > 0 else -outputs


@pytest.mark.parametrize("make_net", [lambda: Decides(4, 3), lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))])
def test_decisions_on_numbers_and_random_numbers_are_refused(make_net: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"a (Decides|Sequential) fails in torch.vmap.*: leave out engine=Stacked"):
        build(make_net).run()


def test_what_cannot_be_stacked_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="no gradient scaler, which float16 needs"):
        build(linear, numerics=Numerics(autocast=torch.float16))
    with pytest.raises(ConfigError, match=r"cannot be stepped by LBFGS, expected one of SGD, Adam, .*RMSprop"):
        build(linear, make_optimizer=lambda net: torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ConfigError, match="trains a tensor that is not a parameter of the member"):
        build(linear, make_optimizer=lambda net: torch.optim.SGD([*net.parameters(), torch.zeros(2)], lr=0.1))
    rates = iter((0.1, 0.1, 0.2))
    with pytest.raises(ConfigError, match="the optimizer of member 2 has other settings than that of member 0"):
        build(linear, make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=next(rates)))
    with pytest.raises(ConfigError, match="one batch per step, got accumulate=2"):
        build(linear, accumulate=2)
    with pytest.raises(ConfigError, match=r"--train\.engine is stacked, which has no gradient scaler"):
        config_of(engine="stacked", precision="float16").check()
    with pytest.raises(ConfigError, match=r"--train\.engine is stackd: did you mean stacked\?"):
        config_of(engine="stackd").check()


@pytest.mark.parametrize("is_dataset", [False, True])
def test_inputs_by_name_are_refused(is_dataset: bool) -> None:
    class Named(nn.Linear):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return super().forward(inputs["it"])

    inputs, targets = torch.randn(40, 4), torch.zeros(40, dtype=torch.long)
    data = [({"it": inputs[row]}, 0) for row in range(40)] if is_dataset else ({"it": inputs}, targets)
    with pytest.raises(ConfigError, match="take inputs of one tensor, not tensors by name: leave out engine"):
        train(lambda: Named(4, 3), data, num_epochs=1, batch_size=10, validation=0.5, engine=Stacked)


def test_members_that_differ_are_refused() -> None:
    class Freeze(Callback):
        def on_step_begin(self, training: Training) -> None:
            training.population[1].requires_grad_(False)

    with pytest.raises(ConfigError, match="member 1 trains other parameters than member 0"):
        build(linear).run([Freeze()])
    plain = lambda inputs, targets, generator: (inputs, targets)  # noqa: E731
    with pytest.raises(DataError, match=r"member 1 trains on .* and targets \(8, 3\) of torch.float32, member 0 on"):
        build(linear, augment=[plain, soft, plain]).run()


def test_a_sick_member_is_restarted_with_fresh_momentum() -> None:
    class Poison(Callback):
        def on_step_begin(self, training: Training) -> None:
            if training.step == 7:
                training.population[1].get_parameter("weight").data.fill_(torch.nan)

    training = build(linear, make_optimizer=OPTIMIZERS["nesterov"], rule=MergeAll(every_steps=5))
    training.run([Poison()])
    assert [event["member"] for event in training.nonfinite] == [1]
    for net, optimizer in zip(training.population, training.optimizers, strict=True):
        assert all(torch.isfinite(tensor).all() for tensor in net.state_dict().values())
        assert all(torch.isfinite(state["momentum_buffer"]).all() for state in optimizer.state.values())
