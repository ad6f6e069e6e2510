"""The stacked engine is the loop, to float tolerance; its slow and obvious twin is the loop itself."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import execute, make_training
from papa import Independent, MergeAll, Population, Push, train
from papa.checkpoint import CheckpointWriter, Expected, load_checkpoint
from papa.data import Data, as_source
from papa.errors import ConfigError, DataError
from papa.lab.config import AverageConfig, Config
from papa.lab.models.head import FrozenBody
from papa.lab.recipes import find
from papa.schedules import cosine
from papa.training import Align, Callback, Numerics, Stacked, Training
from papa.training.state import load_state_, member_states, shared_state


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


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_epoch_end(self, training: Training, record: Any) -> None:
        self.seen.append(record.losses)


def assert_stacked_is_the_loop(
    make_net: Callable[[], nn.Module], callbacks: Callable[[], Sequence[Callback]] = list, **changes: Any
) -> Training:
    trainings, losses = [], []
    tolerance = changes.pop("tolerance", {})
    for stacked in (False, True):
        training, watch = build(make_net, stacked=stacked, **changes), Losses()
        start = copy.deepcopy(training.population[0].state_dict())
        training.run([*callbacks(), watch])
        trainings.append(training)
        losses.append(watch.seen)
    assert any(not torch.equal(start[name], value) for name, value in training.population[0].state_dict().items())
    assert_same_members(*trainings, **tolerance)
    torch.testing.assert_close(
        torch.tensor(losses[1]), torch.tensor(losses[0]), **({"rtol": 1e-4, "atol": 1e-5} | tolerance)
    )
    return trainings[1]


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


def test_bfloat16() -> None:
    half = Numerics(autocast=torch.bfloat16)
    assert_stacked_is_the_loop(Tied, numerics=half, num_epochs=1, tolerance={"rtol": 0.03, "atol": 0.03})
    with pytest.raises(ConfigError, match=r"fails at batch_norm .*BFloat16.*: use the loop engine"):
        build(with_batch_norm, stacked=True, numerics=half).run()


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


@pytest.mark.parametrize(("stop_at", "optimizer"), [(1, "rmsprop"), (7, "nesterov"), (10, "adam")])
def test_stopped_and_resumed_is_never_stopped_also_across_engines(stop_at: int, optimizer: str, tmp_path: Path) -> None:
    def make(stacked: bool) -> Training:
        return build(with_batch_norm, stacked=stacked, make_optimizer=OPTIMIZERS[optimizer])

    whole = make(True)
    whole.run()
    again = resumed(make, first=True, then=True, stop_at=stop_at, directory=tmp_path / "same")
    for net, expected in zip(again.population, whole.population, strict=True):
        for value, other in zip(net.state_dict().values(), expected.state_dict().values(), strict=True):
            assert torch.equal(value, other)
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


def test_random_networks_are_refused_by_the_name_of_the_operator() -> None:
    training = build(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), stacked=True)
    with pytest.raises(
        ConfigError, match=r"cannot train a Sequential: it fails at dropout .*random.*use the loop engine"
    ):
        training.run()


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
