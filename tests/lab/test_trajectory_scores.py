from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import assert_same_bits, small_training
from papa import Population
from papa.align import aligned_soups
from papa.core.rules import Independent, MergeAll
from papa.core.soups import average_soup, greedy_soup
from papa.lab.config import AverageConfig, Config, TrajectoryConfig
from papa.lab.outcome import finalize_run
from papa.repair import reset_batch_norm_
from papa.training import Callback, Training, TrajectoryAverage
from papa.training.checkpoints import (
    CheckpointWriter,
    expected_states,
    load_checkpoint,
    load_state_,
    member_states,
    shared_state,
)


def averages_of(training: Training) -> list[nn.Module]:
    (average,) = [callback for callback in training.callbacks if isinstance(callback, TrajectoryAverage)]
    return average.networks


def test_averages_are_scored_with_re_estimated_batch_norm() -> None:
    training = small_training(callbacks=[TrajectoryAverage(start=0.3)])
    training.run()
    assert training.data.test is not None
    as_it_is = greedy_soup(
        averages_of(training),
        lambda network: training.evaluate([network], training.data.validation)[0][0],
    )
    members_before, (greedy_before,) = as_it_is.members, training.evaluate([as_it_is.network], training.data.test)[0]
    outcome = finalize_run(training, Config(trajectory=TrajectoryConfig(batch_norm_batches=3))).trajectory
    assert outcome is not None
    networks = averages_of(training)
    under_own = [list(training.batches.stream_augmented([member], 3)) for member in range(3)]
    soup = average_soup(networks)
    reset_batch_norm_(soup, [under_own[0][0], under_own[1][1], under_own[2][2]])
    (expected,), _ = training.evaluate([soup], training.data.test)
    assert outcome.test is not None
    assert outcome.test.average_soup.loss == pytest.approx(expected.loss, rel=1e-5)
    for network, batches, found in zip(networks, under_own, outcome.test.members, strict=True):
        reset_batch_norm_(network, batches)
        (expected,), _ = training.evaluate([network], training.data.test)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    result = outcome.to_json()
    assert len(result["test"]["members"]) == 3
    assert result["greedy_as_it_is"] == {"test": greedy_before.score, "members": sorted(members_before)}
    assert result["aligned"] is None


def test_averages_of_independent_members_have_aligned_soups_too() -> None:
    training = small_training(callbacks=[TrajectoryAverage(start=0.3)], rule=Independent(), num_epochs=2)
    training.run()
    config = Config(
        average=AverageConfig(align_soups=True, align_batches=None), trajectory=TrajectoryConfig(batch_norm_batches=3)
    )
    outcome = finalize_run(training, config)
    assert outcome.trajectory is not None
    assert outcome.trajectory.aligned is not None
    networks = averages_of(training)
    expected = aligned_soups(
        Population(networks),  # whose BatchNorm was re-estimated
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        training.batches.plain(None),
        by="activations",
        repair_batches=training.batches.plain_repair(),
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
    assert finalize_run(training, Config()).trajectory is None


class Stop(Exception):  # noqa: N818
    pass


class StopAt(Callback):
    def __init__(self, step: int, directory: Path) -> None:
        self.step, self.directory = step, directory

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.step:
            writer = CheckpointWriter(self.directory, group=training.group, num_members=training.population.size)
            writer.save(training.step, member_states(training), shared_state(training), flush=lambda: None)
            assert writer.settle() is None
            raise Stop


@pytest.mark.parametrize("stop_at", [2, 7, 11])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_stopped_and_resumed_averages_are_those_of_a_run_never_stopped(
    tmp_path: Path, stop_at: int, decay: float | None
) -> None:
    def make() -> Training:
        return small_training(callbacks=[TrajectoryAverage(decay=decay, start=0.3)], rule=MergeAll(every_steps=4))

    whole = make()
    whole.run()
    with pytest.raises(Stop):
        make().run([StopAt(stop_at, tmp_path)])
    again = make()
    found = load_checkpoint(tmp_path / f"step-{stop_at:08d}", expected_states(again), num_members=3)
    load_state_(again, found.step, found.state, found.members)
    again.run()
    for one, other in zip(averages_of(again), averages_of(whole), strict=True):
        assert_same_bits(one.state_dict(), other.state_dict())
    assert any(torch.is_floating_point(tensor) for tensor in averages_of(again)[0].state_dict().values())


class Poison(Callback):
    """Makes a member non-finite at a step."""

    def on_step_complete(self, training: Training) -> None:
        if training.step == 7:
            with torch.no_grad():
                next(training.population[1].parameters()).fill_(torch.nan)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_the_average_of_a_member_that_was_non_finite_starts_again(decay: float | None) -> None:
    average = TrajectoryAverage(decay=decay)
    training = small_training(callbacks=[average], rule=MergeAll(every_steps=4))
    training.run([Poison()])
    assert [event["member"] for event in training.nonfinite] == [1]
    for network in average.networks:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values())
    assert average.num_averaged(1) < average.num_averaged(0)
