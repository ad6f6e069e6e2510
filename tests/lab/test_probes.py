import copy
from typing import Any

import pytest
import torch

from helpers import assert_same_bits, small_data, small_training, snapshot
from papa import Independent, MergeAll, Push, evaluate
from papa.errors import ConfigError
from papa.lab.probes import MergeProbes
from papa.lab.result import fold_merges
from papa.training import Callback, EpochRecord, Training
from papa.training.checkpoints import load_state_, member_states, shared_state
from papa.training.data import Data


def probed(*more: Callback, **changes: Any) -> tuple[Training, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    training = small_training(**changes)
    training.run([MergeProbes(events.append, steps_later=2), *more])
    return training, events


class Scores(Callback):
    """Scores members by hand after every averaging and after every step."""

    def __init__(self) -> None:
        self.merges: dict[int, list[float]] = {}
        self.steps: dict[int, list[float]] = {}

    def on_averaging(self, training: Training, averaging: object) -> None:
        self.merges[training.step] = scores_of(training)

    def on_step_complete(self, training: Training) -> None:
        self.steps[training.step] = scores_of(training)


def scores_of(training: Training) -> list[float]:
    assert training.data.test is not None
    batches = [training.data.test.batch(torch.arange(80))]
    return [evaluate(net, batches).score for net in training.population]


def test_scores_are_those_of_the_members_at_that_time() -> None:
    by_hand, apart = Scores(), Scores()
    _, events = probed(by_hand)
    _, unrepaired = probed(repair=None)
    small_training(rule=Independent()).run([apart])
    folded = fold_merges(events)
    assert [event["step"] for event in folded] == [5, 10]  # not after the last step
    assert [event["epoch"] for event in folded] == [1, 2]
    assert folded[0]["before"] == apart.steps[5]
    assert folded[0]["after_unrepaired"] == unrepaired[0]["after"]
    assert "after_unrepaired" not in unrepaired[0]
    for event in folded:
        assert event["data"] == "test"
        assert event["after"] == by_hand.merges[event["step"]]
        assert event["later"] == by_hand.steps[event["step"] + 2]
        assert event["steps_later"] == 2


def test_they_change_nothing() -> None:
    training, _ = probed()
    plain = small_training()
    plain.run()
    for first, second in zip(training.population, plain.population, strict=True):
        assert_same_bits(snapshot(first), snapshot(second))


class StopError(Exception):
    pass


class Checkpoints(Callback):
    """Saves after every epoch, as a run does, and stops at a step."""

    def __init__(self, events: list[dict[str, Any]], stop_at: int) -> None:
        self.events, self.stop_at = events, stop_at
        self.saved: Any = None

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.saved = copy.deepcopy((training.step, shared_state(training), member_states(training)))

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.stop_at:
            raise StopError


@pytest.mark.parametrize("stop_at", [5, 6, 7, 8, 11])
@pytest.mark.parametrize("rule", [MergeAll(every_steps=5), MergeAll(every_steps=3)])
def test_a_resumed_run_logs_what_an_unbroken_one_does(stop_at: int, rule: MergeAll) -> None:
    _, whole = probed(rule=rule)
    events: list[dict[str, Any]] = []
    callback = Checkpoints(events, stop_at)
    with pytest.raises(StopError):
        small_training(rule=rule).run([MergeProbes(events.append, steps_later=2), callback])
    kept = [event for event in events if event["step"] <= callback.saved[0]]  # the rest will be logged again
    resumed = small_training(rule=rule)
    load_state_(resumed, *callback.saved)
    resumed.run([MergeProbes(kept.append, steps_later=2)])
    assert kept == whole


def test_without_test_data_they_look_at_validation_data_and_at_no_more_than_asked() -> None:
    data = small_data()
    events: list[dict[str, Any]] = []
    training = small_training(data=Data(train=data.train, validation=data.validation))
    seen: list[int] = []
    evaluate_population = training.evaluate_population

    def spy(source: Any) -> Any:
        seen.append(len(source))
        return evaluate_population(source)

    training.evaluate_population = spy  # type: ignore[method-assign]
    training.run([MergeProbes(events.append, steps_later=1, num_examples=30)])
    assert {event["data"] for event in events} == {"validation"}
    assert seen.count(30) == 2 * 4  # before, after, unrepaired and later
    assert set(seen) == {30, 80}


@pytest.mark.parametrize("rule", [Push(alpha=0.9), Independent()])
def test_rules_that_do_not_merge_have_no_probes(rule: Any) -> None:
    assert probed(rule=rule)[1] == []


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(ConfigError, match="score 5 steps after a merge, but members are merged every 5 steps"):
        small_training().run([MergeProbes(print, steps_later=5)])
    with pytest.raises(ConfigError, match="steps_later 0 and num_examples 1000, expected at least 1"):
        MergeProbes(print, steps_later=0)


def test_a_merge_near_the_end_has_no_later() -> None:
    _, events = probed(rule=MergeAll(every_steps=14))
    (merge,) = fold_merges(events)
    assert merge["later"] is merge["steps_later"] is None
