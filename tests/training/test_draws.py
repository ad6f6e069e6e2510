"""Random numbers of stacked members: those of the loop, whatever the other members, the processes and resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import assert_same_bits, execute
from papa import Independent
from papa.errors import ConfigError
from papa.lab.recipes import find
from papa.training import Numerics, Training
from stacked_twin import assert_same_members, assert_stacked_is_the_loop, build, resumed


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return between(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2))


def dropout_and_batch_norm() -> nn.Module:
    first = nn.Linear(4, 8, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.Dropout(0.3, inplace=True), nn.ReLU(), nn.Linear(8, 3))


def dropout_of_channels() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.Dropout2d(0.3),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.FeatureAlphaDropout(0.2),
        nn.Flatten(),
        nn.AlphaDropout(0.1),
        nn.Linear(36, 3),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 8), layer, nn.Flatten(), nn.Linear(16, 3))


def drop_path() -> nn.Module:
    return between(Apply(lambda inputs: inputs * inputs.new_empty(len(inputs), 1).bernoulli_(0.7)))


def dropout_of_accelerators() -> nn.Module:
    """One operator gives outputs and mask."""
    return between(Apply(lambda inputs: torch.native_dropout(inputs, 0.4, True)[0]))


def noise() -> nn.Module:
    """The same operator twice, numbers of other shapes and kinds, and a draw that is used in the backward pass."""
    return between(
        Apply(lambda inputs: inputs * torch.randn_like(inputs) + torch.randn_like(inputs) + torch.rand(8)),
        Apply(lambda inputs: inputs * torch.normal(1.0, 0.5, (8,)) + torch.randint(3, (8,))),
        Apply(F.gumbel_softmax),
    )


NETWORKS = [
    with_dropout,
    dropout_and_batch_norm,
    dropout_of_channels,
    transformer,
    drop_path,
    dropout_of_accelerators,
    noise,
]


@pytest.mark.parametrize("make_net", NETWORKS, ids=lambda it: it.__name__)
def test_members_draw_what_the_loop_draws(make_net: Callable[[], nn.Module]) -> None:
    assert_stacked_is_the_loop(make_net)


def test_other_memory_orders_and_precisions() -> None:
    assert_stacked_is_the_loop(dropout_of_channels, numerics=Numerics(channels_last=True))
    half = Numerics(autocast=torch.bfloat16)
    near = {"rtol": 0.05, "atol": 0.05}
    assert_stacked_is_the_loop(dropout_and_batch_norm, numerics=half, num_epochs=1, tolerance=near)


def test_random_numbers_do_not_depend_on_other_members() -> None:
    three, two = (build(with_dropout, stacked=True, rule=Independent(), num_members=number) for number in (3, 2))
    three.run()
    two.run()
    for found, expected in zip(two.population, list(three.population)[:2], strict=True):
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert (three.population[0][0].weight != three.population[1][0].weight).all()  # type: ignore[index]


@pytest.mark.parametrize("stop_at", [1, 7])
def test_stopped_and_resumed_is_never_stopped(stop_at: int, tmp_path: Path) -> None:
    def make(stacked: bool) -> Training:
        return build(dropout_and_batch_norm, stacked=stacked)

    whole = make(True)
    whole.run()
    again = resumed(make, first=True, then=True, stop_at=stop_at, directory=tmp_path / "same")
    for net, expected in zip(again.population, whole.population, strict=True):
        assert_same_bits(net.state_dict(), expected.state_dict())
    for first in (True, False):
        other = resumed(make, first=first, then=not first, stop_at=stop_at, directory=tmp_path / str(first))
        assert_same_members(other, whole)


def test_global_random_state_is_left_as_found() -> None:
    training = build(with_dropout, stacked=True)
    before = torch.random.get_rng_state()
    training.run()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_workers_draw_for_their_own_members(tmp_path: Path) -> None:
    config = find("wine-mlp").config()
    config = replace(config, members=3, train=replace(config.train, epochs=2, engine="stacked"))
    one, two = (execute(config, tmp_path / str(workers), workers=workers) for workers in (1, 2))
    loop = execute(replace(config, train=replace(config.train, engine="loop")), tmp_path / "loop", workers=1)
    for other in (two, loop):
        losses = torch.tensor(other["test"]["loss"]["members"])
        torch.testing.assert_close(losses, torch.tensor(one["test"]["loss"]["members"]), rtol=1e-3, atol=1e-4)


def test_numbers_that_depend_on_others_are_refused() -> None:
    message = "cannot draw the random numbers of {}, which depend on other numbers or on a generator of the network"
    generator = torch.Generator()
    for name, layer in {
        "rrelu_with_noise": nn.RReLU(),
        "bernoulli": Apply(lambda inputs: inputs * torch.bernoulli(torch.full((8,), 0.5))),
        "rand": Apply(lambda inputs: inputs + torch.rand(8, generator=generator)),
        "exponential": Apply(lambda inputs: inputs + torch.empty(8).exponential_(generator=generator)),
    }.items():
        with pytest.raises(ConfigError, match=f"{message.format(name)}: use the loop engine"):
            build(lambda layer=layer: between(layer), stacked=True).run()  # type: ignore[misc]


def test_a_network_that_draws_differently_each_time_is_refused() -> None:
    calls = []

    def draw(inputs: Tensor) -> Tensor:
        calls.append(1)
        return F.dropout(inputs, 0.5) if len(calls) % 2 else inputs + torch.rand(8)

    with pytest.raises(ConfigError, match=r"random numbers as the member alone does: found .*: use the loop engine"):
        build(lambda: between(Apply(draw)), stacked=True).run()
