"""The stacked engine is the loop, to float tolerance; its slow and obvious twin is the loop itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import assert_same_bits, execute
from papa import Independent, MergeAll, Population, train
from papa.errors import ConfigError, DataError
from papa.lab.config import AverageConfig, Config
from papa.lab.models.head import FrozenBody
from papa.lab.recipes import find
from papa.training import Align, Callback, Numerics, Stacked, Training
from papa.training.data import Data
from stacked_twin import (
    assert_same_members,
    assert_stacked_is_the_loop,
    build,
    convolutional,
    make_data,
    resumed,
    with_batch_norm,
)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


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


@pytest.mark.parametrize("make_net", [linear, with_batch_norm, convolutional, Tied])
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
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5, centered=True),
    "two groups": lambda net: torch.optim.SGD(
        [{"params": list(net.parameters())[:2]}, {"params": list(net.parameters())[2:], "lr": 0.01}], lr=0.05
    ),
    "part of the network": lambda net: torch.optim.SGD(list(net.parameters())[2:], lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer(name: str) -> None:
    assert_stacked_is_the_loop(with_batch_norm, make_optimizer=OPTIMIZERS[name])


def test_clipping_is_by_member() -> None:
    assert_stacked_is_the_loop(convolutional, numerics=Numerics(clip_norm=0.5))


def with_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def with_instance_norm() -> nn.Module:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), norm, nn.Flatten(), nn.Linear(36, 3)
    )


@pytest.mark.parametrize(
    "make_net", [Tied, with_batch_norm, convolutional, with_layer_norm, with_instance_norm], ids=lambda it: it.__name__
)
def test_bfloat16(make_net: Callable[[], nn.Module]) -> None:
    half = Numerics(autocast=torch.bfloat16)
    assert_stacked_is_the_loop(make_net, numerics=half, num_epochs=1, tolerance={"rtol": 0.03, "atol": 0.03})


def test_norms_of_networks_in_half_precision() -> None:
    """All of the network is bfloat16, so that norms need no conversion."""

    def make() -> nn.Module:
        return with_batch_norm().bfloat16()

    assert_stacked_is_the_loop(
        make, prepare=lambda inputs: inputs.bfloat16(), num_epochs=1, tolerance={"rtol": 0.1, "atol": 0.1}
    )


def test_channels_last() -> None:
    assert_stacked_is_the_loop(convolutional, numerics=Numerics(channels_last=True))


def noise(inputs: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return inputs + torch.randn(inputs.shape, generator=generator), F.one_hot(targets, 3).float()


def test_augmentation_is_drawn_as_the_loop_draws_it() -> None:
    assert_stacked_is_the_loop(with_batch_norm, augment=noise)


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset with a random transform that draws from the global generator."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) / 60 + torch.randn(4), torch.tensor(index % 3)


def test_datasets_with_random_transforms() -> None:
    data = Data(train=Noisy(), validation=make_data().validation)  # type: ignore[arg-type]
    assert_stacked_is_the_loop(linear, data=data)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.body(inputs))))


def test_a_frozen_body_stays_until_it_is_thawed() -> None:
    assert_stacked_is_the_loop(Headed, callbacks=lambda: [FrozenBody(0.5)], numerics=Numerics(clip_norm=0.1))


class ToChannelsLast(Callback):
    """Brings all members into another memory order in the middle of training, so that the matrix is laid out anew."""

    def on_step_begin(self, training: Training) -> None:
        if training.step == 5:
            for net in training.population:
                net.to(memory_format=torch.channels_last)
            training.population.refresh_()


def test_the_matrix_may_be_laid_out_anew() -> None:
    assert_stacked_is_the_loop(convolutional, callbacks=lambda: [ToChannelsLast()])


@pytest.mark.parametrize(("stop_at", "optimizer"), [(1, "rmsprop"), (7, "nesterov"), (10, "adam")])
def test_stopped_and_resumed_is_never_stopped_also_across_engines(stop_at: int, optimizer: str, tmp_path: Path) -> None:
    def make(stacked: bool) -> Training:
        return build(with_batch_norm, stacked=stacked, make_optimizer=OPTIMIZERS[optimizer])

    whole = make(True)
    whole.run()
    again = resumed(make, first=True, then=True, stop_at=stop_at, directory=tmp_path / "same")
    for net, expected in zip(again.population, whole.population, strict=True):
        assert_same_bits(net.state_dict(), expected.state_dict())
    for first in (True, False):
        other = resumed(make, first=first, then=not first, stop_at=stop_at, directory=tmp_path / str(first))
        assert_same_members(other, whole)


def test_optimizers_have_their_state_again_after_training() -> None:
    trained = [build(linear, stacked=stacked) for stacked in (False, True)]
    for training in trained:
        training.run()
        training.length = replace(training.length, num_steps=training.length.num_steps + 4)
        training.averager.num_steps = training.length.num_steps
        training.engine = None
        training.run()
    assert_same_members(*trained)


def test_stacked_views_are_the_members_numbers() -> None:
    population = Population([with_batch_norm() for _ in range(3)])
    views = population._stacked()
    for index, net in enumerate(population):
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                assert torch.equal(views[name][index], value)
    views["0.weight"][1] = 7.0
    assert (population[1][0].weight == 7.0).all()  # type: ignore[index]
    assert not (population[0][0].weight == 7.0).any()  # type: ignore[index]


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


def test_decisions_on_numbers_are_refused() -> None:
    class Decides(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            return outputs if outputs.sum() > 0 else -outputs

    with pytest.raises(ConfigError, match=r"cannot train a Decides: it fails at .*: use the loop engine"):
        build(lambda: Decides(4, 3), stacked=True).run()


def test_what_cannot_be_stacked_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="no gradient scaler, which float16 needs"):
        build(linear, stacked=True, numerics=Numerics(autocast=torch.float16))
    with pytest.raises(ConfigError, match=r"cannot step LBFGS, expected one of SGD, Adam, AdamW, RMSprop"):
        build(linear, stacked=True, make_optimizer=lambda net: torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ConfigError, match="trains a tensor that is not a parameter of the member"):
        build(
            linear,
            stacked=True,
            make_optimizer=lambda net: torch.optim.SGD([*net.parameters(), torch.zeros(2)], lr=0.1),
        )
    rates = iter((0.1, 0.1, 0.2))
    with pytest.raises(ConfigError, match="the optimizer of member 2 has other settings than that of member 0"):
        build(linear, stacked=True, make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=next(rates)))
    with pytest.raises(ConfigError, match=r"--train\.engine is stacked, which has no gradient scaler"):
        config_of(engine="stacked", precision="float16").check()
    with pytest.raises(ConfigError, match="state, which alignment would have to permute"):
        build(linear, stacked=True, align=Align(by="weights"))
    aligned = replace(config_of(engine="stacked"), average=AverageConfig(alpha=0.9, align="weights"))
    with pytest.raises(ConfigError, match=r"--train\.engine is stacked, which cannot align members"):
        aligned.check()
    with pytest.raises(ConfigError, match=r"--train\.engine is stackd: did you mean stacked\?"):
        config_of(engine="stackd").check()


@pytest.mark.parametrize("is_dataset", [False, True])
def test_inputs_by_name_are_refused(is_dataset: bool) -> None:
    class Named(nn.Linear):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return super().forward(inputs["it"])

    inputs, targets = torch.randn(40, 4), torch.zeros(40, dtype=torch.long)
    data = [({"it": inputs[row]}, 0) for row in range(40)] if is_dataset else ({"it": inputs}, targets)
    with pytest.raises(ConfigError, match="take inputs of one tensor, not tensors by name: use the loop engine"):
        train(lambda: Named(4, 3), data, num_epochs=1, batch_size=10, validation=0.5, engine=Stacked)


def test_members_that_differ_are_refused() -> None:
    class Freeze(Callback):
        def on_step_begin(self, training: Training) -> None:
            training.population[1].requires_grad_(False)

    with pytest.raises(ConfigError, match="member 1 trains other parameters than member 0"):
        build(linear, stacked=True).run([Freeze()])
    plain = lambda inputs, targets, generator: (inputs, targets)  # noqa: E731
    with pytest.raises(DataError, match=r"member 1 trains on .* and targets \(8, 3\) of torch.float32, member 0 on"):
        build(linear, stacked=True, augment=[plain, noise, plain]).run()


def test_train_takes_an_engine() -> None:
    inputs = torch.randn(100, 4)
    outcome = train(
        linear, (inputs, torch.zeros(100).long()), num_members=2, num_epochs=1, batch_size=10, engine=Stacked
    )
    assert len(outcome.population) == 2


def test_a_sick_member_is_restarted_with_fresh_momentum() -> None:
    class Poison(Callback):
        def on_step_begin(self, training: Training) -> None:
            if training.step == 7:
                training.population[1].get_parameter("weight").data.fill_(torch.nan)

    training = build(linear, stacked=True, make_optimizer=OPTIMIZERS["nesterov"], rule=MergeAll(every_steps=5))
    training.run([Poison()])
    assert [event["member"] for event in training.nonfinite] == [1]
    for net, optimizer in zip(training.population, training.optimizers, strict=True):
        assert all(torch.isfinite(tensor).all() for tensor in net.state_dict().values())
        assert all(torch.isfinite(state["momentum_buffer"]).all() for state in optimizer.state.values())
