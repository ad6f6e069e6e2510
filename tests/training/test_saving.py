"""`papa.train` with checkpoints: the same call goes on, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import papa
from helpers import assert_same_bits, small_data, small_net
from papa.errors import RunError
from papa.storage.lock import Lock
from papa.training import (
    AveragingOptions,
    Callback,
    EpochRecord,
    Monitoring,
    Outcome,
    Repair,
    Stacked,
    Training,
    TrajectoryAverage,
    Transforms,
)
from papa.training.checkpoints import with_digest

NUM_STEPS = 15


class Steps(Callback):
    """Notes which steps were taken, and what was told; breaks off after one of them where asked to."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.taken: list[int] = []
        self.epochs: list[EpochRecord] = []
        self.notices: list[str] = []

    def on_step_complete(self, training: Training) -> None:
        self.taken.append(training.step)
        if training.step == self.last:
            raise KeyboardInterrupt

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.epochs.append(record)

    def on_event(self, training: Training, event: Any) -> None:
        if event["event"] == "notice":
            self.notices.append(event["text"])


def train(callback: Callback, checkpoints: Path | None, **changes: Any) -> Outcome:
    """Three epochs of five steps."""
    options: dict[str, Any] = {
        "num_members": 3,
        "num_epochs": 3,
        "batch_size": 16,
        "rule": papa.Push(alpha=0.9, every_steps=4),
        "transforms": Transforms(
            augment=lambda inputs, targets, generator: (
                inputs + torch.randn(inputs.shape, generator=generator),
                targets,
            )
        ),
    }
    decay = changes.pop("average", None)
    callbacks = [callback] if decay is None else [TrajectoryAverage(decay=decay), callback]
    return papa.train(small_net, small_data(), callbacks=callbacks, checkpoints=checkpoints, **{**options, **changes})


def assert_same(found: Outcome, expected: Outcome) -> None:
    for one, other in zip(found.population, expected.population, strict=True):
        assert_same_bits(one.state_dict(), other.state_dict())
    assert_same_bits(found.average_soup.state_dict(), expected.average_soup.state_dict())
    assert found.validation == expected.validation
    assert (found.best_soup is None) == (expected.best_soup is None)
    if found.best_soup is not None and expected.best_soup is not None:
        assert found.best_soup.to_json() == expected.best_soup.to_json()
        assert_same_bits(found.best_soup.network.state_dict(), expected.best_soup.network.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rule": papa.MergeAll(every_steps=4), "averaging": AveragingOptions(repair=Repair(num_batches=2))},
        {"make_optimizer": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)},
        {"average": 0.9},
        {"monitoring": Monitoring(keep_best_soup=True)},
        {"monitoring": Monitoring(keep_best_soup=True, validate_every=2)},
        {"engine": Stacked},
        {"rule": papa.AdaptivePush(every_steps=2, check_every=4)},
        {"rule": papa.AdaptivePush(every_steps=2, check_every=4), "engine": Stacked},
    ],
    ids=["push", "merge", "adamw", "average", "best soup", "rare scores", "stacked", "adaptive", "adaptive stacked"],
)
@pytest.mark.parametrize("last", [7, 10, NUM_STEPS])
def test_a_call_that_was_broken_off_goes_on_to_the_same_bits(
    tmp_path: Path, last: int, changes: dict[str, Any]
) -> None:
    unbroken, again = Steps(), Steps()
    whole = train(unbroken, None, **changes)
    with pytest.raises(KeyboardInterrupt):
        train(Steps(last), tmp_path / "kept", **changes)
    assert_same(train(again, tmp_path / "kept", **changes), whole)
    assert again.epochs == unbroken.epochs[len(unbroken.epochs) - len(again.epochs) :]
    assert again.taken or last == NUM_STEPS
    done = Steps()
    assert_same(train(done, tmp_path / "kept", **changes), whole)
    assert done.taken == []


def test_a_broken_call_takes_up_at_its_last_epoch(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Steps(12), tmp_path)
    again = Steps()
    train(again, tmp_path)
    assert again.taken[0] in (6, 11)  # epochs that end while the one before is still being written are passed over
    assert [record.epoch for record in again.epochs][-1] == 3
    assert not (tmp_path / ".lock").exists()


def test_another_training_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    train(Steps(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for changes, difference in (
        ({"batch_size": 20}, "batch_size is 16, expected 20"),
        ({"seed": 2}, "seed is 1, expected 2"),
        ({"num_epochs": 2}, "num_epochs is 3, expected 2"),
        ({"rule": papa.MergeAll(every_steps=4)}, "rule is 'Push', expected 'MergeAll'"),
        ({"num_members": 2}, "has 3 members, expected 2"),
        (
            {"make_optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.05)},
            "optimizer's learning rate is 0.1, expected 0.05",
        ),
        (
            {"make_optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)},
            "optimizer's weight decay is 0.0001, expected 0.5",
        ),
        ({"make_optimizer": lambda net: torch.optim.Adam(net.parameters())}, "optimizer is 'SGD', expected 'Adam'"),
    ):
        with pytest.raises(RunError, match=difference):
            train(Steps(), tmp_path, **changes)
    with pytest.raises(RunError, match="does not fit"):
        papa.train(
            lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
            small_data(),
            num_members=3,
            num_epochs=3,
            batch_size=16,
            checkpoints=tmp_path,
        )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with Lock(tmp_path / ".lock"), pytest.raises(RunError, match="is in use by another process"):
        train(Steps(), tmp_path)


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path) -> None:
    whole = train(Steps(), tmp_path / "whole")
    directory = tmp_path / "kept"
    train(Steps(), directory)
    newest = max(directory.glob("step-*"))
    file = newest / "member-001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    again = Steps()
    assert_same(train(again, directory), whole)
    assert again.taken[-1] == NUM_STEPS
    assert "continuing from step" in again.notices[0]
    for path in directory.glob("step-*"):
        (path / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read; remove them to start again"):
        train(Steps(), directory)


def test_what_papa_run_wrote_is_not_taken_for_it(tmp_path: Path) -> None:
    train(Steps(), tmp_path)
    newest = max(tmp_path.glob("step-*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["state"]["facts"]
    (newest / "manifest.json").write_text(json.dumps(with_digest(manifest)))
    with pytest.raises(RunError, match=r"was not written by papa\.train: choose another directory"):
        train(Steps(), tmp_path)
