"""Trackers, each with the real tool offline: what was logged is read back, also after a resume."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import papa
from papa.cli import main
from papa.core.averaging_report import Averaging
from papa.errors import ConfigError, RunError
from papa.evaluation.scores import Evaluation
from papa.integrations.tracker_names import NAMES
from papa.integrations.trackers import TRACKERS, Track, TrackedRun, epoch_values
from papa.training import Callback, CheckpointOptions, EpochRecord, EpochScores, Training

Logged = dict[str, dict[int, float]]
"""The value of each step, by name."""


def read_tensorboard(directory: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def wandb_records(file: Path) -> list[bytes]:
    """The records of a run's file: chunks in blocks of 32 kB, each with a checksum, a length and a kind."""
    content, position, records, parts = file.read_bytes(), 7, [], b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def read_wandb(directory: Path) -> Logged:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Logged = {}
    files = sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # one id, also after a resume
    for file in files:
        for data in wandb_records(file):
            record = Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    return found


def read_trackio(directory: Path) -> Logged:
    found: Logged = {}
    connection = sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "tested.db")
    rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    connection.close()
    assert {name for name, _, _ in rows} == {"first"}
    for _, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            found.setdefault(name, {})[step] = value
    return found


def read_mlflow(directory: Path) -> Logged:
    from mlflow import MlflowClient

    client = MlflowClient((directory / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("tested")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["num_members"] == "2"
    return {
        name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


READERS: dict[str, Callable[[Path], Logged]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # read when trackio is first imported


class Memory(Callback):
    """Collects all records and averagings, also those before a resume."""

    def __init__(self) -> None:
        self.by_step: dict[int, EpochRecord] = {}
        self.averagings: list[Averaging] = []

    @property
    def epochs(self) -> list[EpochRecord]:
        return list(self.by_step.values())

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.by_step[record.step] = record  # one that happened again is the same

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        self.averagings.append(averaging)


class StopError(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, training: Training) -> None:
        if training.step == self.step:
            raise StopError


def train(directory: Path, *callbacks: Callback, num_epochs: int = 4) -> None:
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    papa.train(
        lambda: nn.Linear(4, 2),
        (inputs, (inputs.sum(dim=1) > 0).long()),
        num_members=2,
        num_epochs=num_epochs,
        batch_size=20,
        validation=0.25,
        rule=papa.Push(alpha=0.9, every_steps=1),
        callbacks=callbacks,
        checkpoints=CheckpointOptions(directory / "saved", background=False),
    )


@pytest.mark.parametrize("name", NAMES)
def test_all_values_are_read_back_after_a_resume(name: Any, tmp_path: Path) -> None:
    memory = Memory()
    options = {"project": "tested", "name": "first", "directory": tmp_path}
    with pytest.raises(StopError):  # the averaging of step 7 happens again after the resume
        train(tmp_path, memory, Track(name, **options), StopAt(7))
    train(tmp_path, memory, Track(name, **options))
    logged = READERS[name](tmp_path)
    assert [record.step for record in memory.epochs] == [3, 6, 9, 12]
    for tag, values in {
        "loss/member_1": [record.losses[1] for record in memory.epochs],
        "validation_score/member_0": [record.validation.members[0].score for record in memory.epochs],
        "validation_score/ensemble": [record.validation.ensemble.score for record in memory.epochs],
        "validation_score/average_soup": [record.validation.average_soup.score for record in memory.epochs],
        "distance_to_mean/mean": [sum(record.distances) / 2 for record in memory.epochs],
        "learning_rate": [record.lr for record in memory.epochs],
    }.items():
        expected = {record.step: value for record, value in zip(memory.epochs, values, strict=True)}
        assert logged[tag] == pytest.approx(expected)
    before = {event.step: sum(event.distances_before or ()) / 2 for event in memory.averagings}
    assert list(before) == list(range(1, 13))
    assert logged["distance_around_averaging/before"] == pytest.approx(before)


def test_a_new_training_removes_older_event_files(tmp_path: Path) -> None:
    for directory, num_epochs in ((tmp_path / "a", 4), (tmp_path / "b", 2)):
        train(directory, Track("tensorboard", directory=tmp_path), num_epochs=num_epochs)
        (tmp_path / "tensorboard" / "mine.txt").write_text("kept")
    assert list(read_tensorboard(tmp_path)["learning_rate"]) == [3, 6]
    assert (tmp_path / "tensorboard" / "mine.txt").exists()


def test_soups_and_test_scores_are_logged_if_they_were_evaluated() -> None:
    score = Evaluation(loss=0.5, score=90.0)
    scores = EpochScores([score], score, score._replace(score=92.0))
    record = EpochRecord(epoch=1, step=3, lr=0.1, losses=[1.0], distances=[0.0], validation=scores, test=scores)
    values = epoch_values(record)
    assert (values["test_score/average_soup"], values["test_score/mean"], values["test_loss/mean"]) == (92.0, 90.0, 0.5)


class Own:
    """A tracker of one's own, which fails when it is told to."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        if self.failing == name:
            raise OSError("no connection")
        self.calls.append(name)

    def init(self, run: TrackedRun) -> None:
        self._call(f"init {run.step} {dict(run.config)['num_epochs']}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._call(f"log {step}")

    def finish(self, *, failed: bool) -> None:
        self._call(f"finish {failed}")


class Refusing(Own):
    def init(self, run: TrackedRun) -> None:
        raise OSError("no connection")


class Events(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        self.texts.append(event["text"])


def test_a_tracker_of_ones_own(tmp_path: Path) -> None:
    own = Own()
    train(tmp_path, Track(own), num_epochs=1)
    assert own.calls == ["init 0 1", "log 1", "log 2", "log 3", "log 3", "finish False"]
    stopped = Own()
    with pytest.raises(StopError):
        train(tmp_path / "other", Track(stopped), StopAt(1))
    assert stopped.calls == ["init 0 4", "log 1", "finish True"]


def test_a_tracker_that_fails_does_not_stop_training(tmp_path: Path) -> None:
    own, events = Own("log 2"), Events()
    train(tmp_path, Track(own), events, num_epochs=1)
    assert events.texts == ["the tracker Own could not log step 2, training continues: no connection"]
    assert own.calls == ["init 0 1", "log 1", "log 3", "log 3", "finish False"]
    with pytest.raises(RunError, match="the tracker Own cannot be used: no connection"):
        train(tmp_path / "other", Track(Own("init 0 4")))


def test_wrong_names_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no tracker 'wandbb': did you mean wandb"):
        Track("wandbb")  # type: ignore[arg-type]
    monkeypatch.setattr("papa.packages.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package mlflow is not installed: pip install 'papa-torch\[mlflow\]'"):
        Track("mlflow")


def test_a_tracker_that_cannot_start_leaves_the_run_that_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["run", "digits", "--budget", "smoke", "--out", str(out)]
    assert main(command) == 0
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    monkeypatch.setitem(TRACKERS, "tensorboard", Refusing)
    assert main([*command, "--overwrite", "--tracker", "tensorboard"]) == 2
    assert "the tracker Refusing cannot be used: no connection" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_runs_log_to_several_trackers_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = ["--tracker", "tensorboard", "--tracker", "mlflow", "--tracker-project", "tested"]
    short = ["--train.batch-size", "64", "--members", "2", "--train.epochs", "1"]
    assert main(["run", "digits", *short, *options, "--out", str(out)]) == 0
    (out / "result.json").unlink()
    assert main(["resume", str(out), *options]) == 0
    assert len(list((out / "tensorboard").glob("events.out.tfevents.*"))) == 2
    from mlflow import MlflowClient

    client = MlflowClient((out / "mlflow").resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tested").experiment_id])
    assert run.info.run_name == "digits papa seed 1"
    assert run.data.params["train.epochs"] == "1"
    assert run.data.metrics["validation_score/average_soup"] > 0
    assert json.loads((out / "result.json").read_text())["method"] == "papa"
