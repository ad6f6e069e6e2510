"""The engine that chooses: its results are, bit for bit, those of the engine that it chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import papa
from helpers import assert_same_bits, small_data
from papa.training import Auto, Callback, CheckpointOptions, Stacked, Training, auto
from papa.training.auto import NUM_ROUNDS

NUM_EPOCHS = 3
FEWER_STEPS = 100
"""Instead of `LEAST_STEPS`, so that tests are short."""


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "LEAST_STEPS", FEWER_STEPS)


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
@pytest.mark.parametrize(("chooser", "engine"), [(TowardsLoop, None), (TowardsStacked, Stacked)])
def test_results_are_those_of_the_chosen_engine(
    chooser: type[Auto], engine: Any, make: Callable[[], nn.Module]
) -> None:
    notices = Notices()
    random_state = torch.random.get_rng_state()
    found = train(chooser, make, callbacks=[notices])
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert_same(found, train(engine, make))
    chosen = "loop" if engine is None else "stacked"
    (text,) = notices.texts
    assert text.startswith(
        f"engine: {chosen} ({1e3 if chosen == 'loop' else 2e3:.3g} ms per step with the loop, "
        f"{2e3 if chosen == 'loop' else 1e3:.3g} ms stacked, measured in "
    )


def test_what_the_trial_recorded_is_used_further(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    record = Stacked._record

    def counted(self: Stacked, *batch: Tensor) -> Any:
        recorded.append(1)
        return record(self, *batch)

    monkeypatch.setattr(Stacked, "_record", counted)
    train(TowardsStacked)
    assert len(recorded) == 1


class Slow(Auto):
    """Engines of which one takes longer, with a clock that only they advance."""

    seconds: ClassVar[Mapping[str, float]]

    def _measure(self) -> dict[str, float] | None:
        turns = self.turns = []  # type: ignore[var-annotated]
        assert self._stacked is not None
        names = {self.training.step_each_: "loop", self._stacked.step_: "stacked"}

        def timed(step: Callable[[], None]) -> float:
            step()
            turns.append(names[step])
            disturbed = 10.0 if len(turns) == 1 else 1.0
            return disturbed * self.seconds[names[step]]

        self._timed = timed  # type: ignore[method-assign]
        return super()._measure()


@pytest.mark.parametrize(
    ("loop", "stacked", "num_turns"),
    [(1.0, 2.0, 4), (2.0, 1.0, 4), (1.0, 1.1, 2 * NUM_ROUNDS), (1.1, 1.0, 2 * NUM_ROUNDS)],
)
def test_engines_take_turns_and_the_best_time_counts(loop: float, stacked: float, num_turns: int) -> None:
    engines: list[Slow] = []

    class Here(Slow):
        seconds: ClassVar[Mapping[str, float]] = {"loop": loop, "stacked": stacked}

        def start_(self) -> None:
            engines.append(self)
            super().start_()

    train(Here)
    (engine,) = engines
    assert engine.chosen == ("loop" if loop < stacked else "stacked")
    assert engine.turns == ["loop", "stacked"] * (num_turns // 2)


def test_a_trial_takes_a_small_share_of_the_training() -> None:
    """Steps seem to take a nanosecond, so that one round is enough; in it, the loop is disturbed."""
    notices = Notices()

    class Short(Slow):
        seconds: ClassVar[Mapping[str, float]] = {"loop": 1e-9, "stacked": 1e-9 + 1e-12}

    train(Short, callbacks=[notices])
    assert notices.texts[0].startswith("engine: stacked (1e-05 ms per step with the loop, 1e-06 ms stacked")


def test_it_measures_and_chooses() -> None:
    notices = Notices()
    found = train(Auto, callbacks=[notices])
    (text,) = notices.texts
    assert_same(found, train(Stacked if text.startswith("engine: stacked") else None))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"make": with_random_slopes}, "the stacked engine cannot draw the random numbers of rrelu_with_noise"),
        ({"num_epochs": 1}, f"the members of a process take fewer than {FEWER_STEPS} steps together"),
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


@pytest.mark.parametrize("chooser", [TowardsLoop, TowardsStacked])
def test_a_resumed_training_keeps_its_engine(chooser: type[Auto], tmp_path: Path) -> None:
    kept = CheckpointOptions(directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(chooser, checkpoints=kept, callbacks=[Notices(stop_at=40)])
    other = TowardsLoop if chooser is TowardsStacked else TowardsStacked
    notices = Notices()
    assert_same(train(other, checkpoints=kept, callbacks=[notices]), train(chooser))
    assert notices.texts == []  # nothing is chosen again
