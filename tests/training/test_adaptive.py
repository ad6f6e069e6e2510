"""`AdaptivePush` in trainings and runs: what it looks at, resuming, processes, windows, non-finite members, logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import papa
from helpers import (
    assert_same_run,
    execute,
    killed_after,
    make_training,
    metrics_of,
    small_config,
    small_data,
    small_net,
)
from papa.lab.config import Config
from papa.training import Callback, Training
from papa.training.probe import TrainingLoss

RULE = papa.AdaptivePush(every_steps=2, check_every=4)


def train(**changes: Any) -> papa.training.Outcome:
    options: dict[str, Any] = {"num_members": 3, "num_epochs": 3, "batch_size": 16, "rule": RULE, **changes}
    return papa.train(small_net, small_data(), **options)


def auto_config() -> Config:
    config = small_config(method="papa-auto", coupling={"every_steps": 1, "check_every": 2})
    return replace(config, members=4, train=replace(config.train, epochs=2))


def test_its_losses_are_of_the_same_training_examples_for_all_networks_of_a_step() -> None:
    training = make_training(small_net, small_data(), num_members=2, num_epochs=1, batch_size=16)
    probe, network = TrainingLoss(training), training.population[0]
    first = probe(network)
    assert network.training
    assert (first, probe(network)) == (TrainingLoss(training)(network), first)
    training.step = 4
    assert probe(network) != first
    network.eval()
    examples = torch.as_tensor(probe._source(4).indices)  # type: ignore[attr-defined]
    inputs, targets = training.data.train.batch(examples)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(network(inputs), targets)
    assert probe(network) == pytest.approx(float(expected), rel=1e-6)


def test_a_loader_with_a_sampler_of_its_own_gives_one_batch() -> None:
    inputs = torch.randn(64, 4)
    dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    loader = DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset, replacement=True))
    outcome = papa.train(
        small_net, loader, validation=(inputs[:8], dataset.tensors[1][:8]), num_members=2, num_epochs=1, rule=RULE
    )
    assert outcome.seconds["evaluate"] > 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auto") / "run"
    execute(auto_config(), path)
    return path


@pytest.mark.parametrize("workers", [2, 4])
def test_several_processes_decide_as_one(alone: Path, tmp_path: Path, workers: int) -> None:
    execute(auto_config(), tmp_path / "run", workers=workers)
    assert_same_run(alone, tmp_path / "run")


def test_a_resumed_run_decides_as_one_that_was_not_stopped(alone: Path, tmp_path: Path) -> None:
    with killed_after(5, settled=True):
        execute(auto_config(), tmp_path / "run")
    execute(auto_config(), tmp_path / "run", resume=True)
    assert_same_run(alone, tmp_path / "run")


def test_every_decision_is_logged(alone: Path) -> None:
    pushes = [event for event in metrics_of(alone) if event["event"] == "average"]
    decisions = [event for event in pushes if "half_life" in event]
    assert [event["step"] for event in decisions] == list(range(2, len(pushes) + 1, 2))
    assert all(event["member_loss"] and event["average_loss"] for event in decisions)
    for event in decisions:
        assert event["alpha"] == pytest.approx(0.5 ** (1 / float(str(event["half_life"]))))


class Seen(Callback):
    """Notes the steps of pushes and of decisions; makes a member non-finite where asked to."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.broken_at = broken_at
        self.pushes: list[int] = []
        self.decisions: dict[int, Any] = {}

    def on_step_begin(self, training: Training) -> None:
        if training.step == self.broken_at:
            with torch.no_grad():
                next(training.population[1].parameters()).fill_(torch.nan)

    def on_averaging(self, training: Training, averaging: papa.core.averager.Averaging) -> None:
        self.pushes.append(averaging.step)
        if averaging.decision is not None:
            self.decisions[averaging.step] = averaging.decision


def test_a_window_starts_and_stops_it() -> None:
    seen = Seen()
    train(rule=replace(RULE, start=6, stop=12), callbacks=[seen])
    assert seen.pushes == [6, 8, 10]
    assert list(seen.decisions) == [6, 8]


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_non_finite_members_do_not_reach_its_decisions(policy: Any) -> None:
    seen = Seen(broken_at=6)
    outcome = train(callbacks=[seen], averaging=papa.training.AveragingOptions(on_nonfinite=policy))
    assert [found["member"] for found in outcome.nonfinite] == [1]
    assert list(seen.decisions) == [4, 8, 12]
    assert all(found["member_loss"] and found["average_loss"] for found in seen.decisions.values())
    assert torch.isfinite(outcome.population.matrix[[0, 2]]).all()
