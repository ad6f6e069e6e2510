"""The engine that chooses: its results are, bit for bit, those of the engine that it chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import papa
from helpers import assert_same_bits, small_data
from papa.training import Auto, Callback, CheckpointOptions, Stacked, Training
from papa.training.auto import LEAST_STEPS

NUM_EPOCHS = 6


class TowardsLoop(Auto):
    """Measures as usual, and then finds the loop faster."""

    faster = "loop"

    def _measure(self) -> dict[str, float] | None:
        found = super()._measure()
        return found and {name: 1.0 if name == self.faster else 2.0 for name in found}


class TowardsStacked(TowardsLoop):
    faster = "stacked"


class Notices(Callback):
    """Collects notices, and may break off training."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.texts: list[str] = []
        self.stop_at = stop_at

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        self.texts += [event["text"]] if event["event"] == "notice" else []

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.stop_at:
            raise KeyboardInterrupt


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def with_random_slopes() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.RReLU(), nn.Linear(8, 3))


def train(engine: Any, make: Callable[[], nn.Module] = make_net, **options: Any) -> papa.training.Outcome:
    usual = {
        "num_members": 3,
        "num_epochs": NUM_EPOCHS,
        "batch_size": 4,
        "rule": papa.Push(alpha=0.5, every_steps=4),
        "make_optimizer": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
        "device": "cpu",
    }
    return papa.train(make, DATA, engine=engine, **{**usual, **options})


DATA = small_data()


def assert_same(found: papa.training.Outcome, expected: papa.training.Outcome) -> None:
    for one, other in zip(found.population, expected.population, strict=True):
        assert_same_bits(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("make", [make_net, with_dropout])
@pytest.mark.parametrize(("auto", "engine"), [(TowardsLoop, None), (TowardsStacked, Stacked)])
def test_results_are_those_of_the_chosen_engine(auto: type[Auto], engine: Any, make: Callable[[], nn.Module]) -> None:
    notices = Notices()
    random_state = torch.random.get_rng_state()
    found = train(auto, make, callbacks=[notices])
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert_same(found, train(engine, make))
    chosen = "loop" if engine is None else "stacked"
    assert notices.texts == [
        f"engine: {chosen} ({1e3 if chosen == 'loop' else 2e3:.3g} ms per step with the loop, "
        f"{2e3 if chosen == 'loop' else 1e3:.3g} ms stacked)"
    ]


def test_it_measures_and_chooses() -> None:
    notices = Notices()
    found = train(Auto, callbacks=[notices])
    (text,) = notices.texts
    assert_same(found, train(Stacked if text.startswith("engine: stacked") else None))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"make": with_random_slopes}, "the stacked engine cannot draw the random numbers of rrelu_with_noise"),
        ({"num_epochs": 2}, f"fewer than {LEAST_STEPS} steps"),
        ({"accumulate": 2}, "the stacked engine takes one batch per step"),
        ({"num_members": 1}, "one member per process"),
    ],
)
def test_the_loop_trains_what_cannot_be_stacked(options: dict[str, Any], reason: str) -> None:
    notices = Notices()
    found = train(TowardsStacked, callbacks=[notices], **options)
    (text,) = notices.texts
    assert text.startswith(f"engine: loop ({reason}")
    assert_same(found, train(None, **options))


@pytest.mark.parametrize("auto", [TowardsLoop, TowardsStacked])
def test_a_resumed_training_keeps_its_engine(auto: type[Auto], tmp_path: Path) -> None:
    kept = CheckpointOptions(directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(auto, checkpoints=kept, callbacks=[Notices(stop_at=40)])
    other = TowardsLoop if auto is TowardsStacked else TowardsStacked
    notices = Notices()
    assert_same(train(other, checkpoints=kept, callbacks=[notices]), train(auto))
    assert notices.texts == []  # nothing is chosen again
