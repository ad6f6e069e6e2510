from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import assert_same_bits, small_training
from papa import Population
from papa.align import aligned_soups
from papa.checkpoint import CheckpointWriter, load_checkpoint
from papa.repair import reset_batch_norm_
from papa.rules import Independent, MergeAll
from papa.soup import average_soup, greedy_soup
from papa.training import Callback, Training, TrajectoryAverage, finalize
from papa.training.state import expected_states, load_state_, member_states, state_of


def test_averages_are_scored_with_batch_norm_of_their_own() -> None:
    training = small_training(companion=TrajectoryAverage(start=0.3))
    training.run()
    assert training.data.test is not None
    as_it_is = greedy_soup(
        training.companion.networks,  # type: ignore[union-attr]
        lambda network: training.evaluate([network], training.data.validation)[0][0],
    )
    members_before, (greedy_before,) = as_it_is.members, training.evaluate([as_it_is.network], training.data.test)[0]
    outcome = finalize(training, num_batch_norm_batches=3).trajectory
    assert outcome is not None
    networks = training.companion.networks  # type: ignore[union-attr]
    batches = training.batches.plain_batches(3)
    soup = average_soup(networks)
    reset_batch_norm_(soup, batches)
    (expected,), _ = training.evaluate([soup], training.data.test)
    assert outcome.test is not None
    assert outcome.test.average_soup.loss == pytest.approx(expected.loss, rel=1e-5)
    result = outcome.to_json()
    assert len(result["test"]["members"]) == 3
    assert result["greedy_as_it_is"] == {"test": greedy_before.score, "members": sorted(members_before)}
    assert result["aligned"] is None


def test_averages_of_independent_members_have_aligned_soups_too() -> None:
    training = small_training(
        companion=TrajectoryAverage(start=0.3), rule=Independent(), num_repair_batches=2, num_epochs=2
    )
    training.run()
    outcome = finalize(training, align_soups=True, num_align_batches=None, num_batch_norm_batches=3)
    assert outcome.trajectory is not None
    assert outcome.trajectory.aligned is not None
    networks = training.companion.networks  # type: ignore[union-attr]
    expected = aligned_soups(
        Population(networks),  # whose BatchNorm was re-estimated
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        training.batches.plain_batches(None),
        by="activations",
        repair_batches=training.batches.plain_repair_batches(),
    )
    assert training.data.test is not None
    (score,), _ = training.evaluate([expected.average], training.data.test)
    found = outcome.trajectory.to_json()["aligned"]
    assert found["test"]["average_soup"] == score.score
    assert outcome.aligned is not None
    assert outcome.aligned.to_json() != found  # those of the members themselves


def test_a_training_without_averages_has_none() -> None:
    training = small_training()
    training.run()
    assert finalize(training).trajectory is None


class Stop(Exception):  # noqa: N818
    pass


class StopAt(Callback):
    def __init__(self, step: int, directory: Path) -> None:
        self.step, self.directory = step, directory

    def after_step(self, training: Training) -> None:
        if training.step == self.step:
            writer = CheckpointWriter(self.directory, group=training.group, num_members=training.population.size)
            writer.save(training.step, member_states(training), state_of(training), flush=lambda: None)
            assert writer.settle() is None
            raise Stop


@pytest.mark.parametrize("stop_at", [2, 7, 11])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_stopped_and_resumed_averages_are_those_of_a_run_never_stopped(
    tmp_path: Path, stop_at: int, decay: float | None
) -> None:
    def make() -> Training:
        return small_training(companion=TrajectoryAverage(decay=decay, start=0.3), rule=MergeAll(every_steps=4))

    whole = make()
    whole.run()
    with pytest.raises(Stop):
        make().run([StopAt(stop_at, tmp_path)])
    again = make()
    found = load_checkpoint(tmp_path / f"step-{stop_at:08d}", expected_states(again), num_members=3)
    load_state_(again, found.step, found.state, found.members)
    again.run()
    for one, other in zip(again.companion.networks, whole.companion.networks, strict=True):  # type: ignore[union-attr]
        assert_same_bits(one.state_dict(), other.state_dict())
    assert any(torch.is_floating_point(tensor) for tensor in again.companion.networks[0].state_dict().values())  # type: ignore[union-attr]


class Poison(Callback):
    """Makes a member sick at a step."""

    def after_step(self, training: Training) -> None:
        if training.step == 7:
            with torch.no_grad():
                next(training.population[1].parameters()).fill_(torch.nan)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_the_average_of_a_member_that_was_sick_begins_anew(decay: float | None) -> None:
    average = TrajectoryAverage(decay=decay, every_steps=1)
    training = small_training(companion=average, rule=MergeAll(every_steps=4))
    training.run([Poison()])
    assert [event["member"] for event in training.nonfinite] == [1]
    for network in average.networks:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values())
    assert average.num_averaged(1) < average.num_averaged(0)
