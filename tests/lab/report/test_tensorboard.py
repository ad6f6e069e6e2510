import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import papa
from helpers import make_training
from papa.averaging import Averaging
from papa.evaluation import Evaluation, accuracy
from papa.lab.report.tensorboard import EventFiles
from papa.schedules import cosine
from papa.training import Callback, EpochRecord, EpochScores, Numerics, Training
from papa.training.state import load_state_, member_states, shared_state

event_files = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = event_files.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Memory(Callback):
    """Collects all records and averagings."""

    def __init__(self) -> None:
        self.epochs: list[EpochRecord] = []
        self.averagings: list[Averaging] = []

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.epochs.append(record)

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        self.averagings.append(averaging)


def train(directory: Path, num_epochs: int) -> Memory:
    inputs = torch.randn(80, 4)
    memory = Memory()
    with EventFiles(directory) as files:
        papa.train(
            lambda: nn.Linear(4, 2),
            (inputs, (inputs.sum(dim=1) > 0).long()),
            num_members=2,
            num_epochs=num_epochs,
            batch_size=20,
            validation=0.25,
            rule=papa.Push(alpha=0.9, every_steps=2),
            callbacks=[files, memory],
        )
    return memory


def test_event_files_contain_the_values_of_training(tmp_path: Path) -> None:
    memory = train(tmp_path, num_epochs=3)
    scalars = read(tmp_path)
    for tag, values in {
        "loss/member_1": [record.losses[1] for record in memory.epochs],
        "validation_score/member_0": [record.validation.members[0].score for record in memory.epochs],
        "validation_score/ensemble": [record.validation.ensemble.score for record in memory.epochs],
        "distance_to_mean/mean": [sum(record.distances) / 2 for record in memory.epochs],
        "learning_rate": [record.lr for record in memory.epochs],
    }.items():
        assert scalars[tag] == [
            (record.step, pytest.approx(value)) for record, value in zip(memory.epochs, values, strict=True)
        ]
    before = [(event.step, pytest.approx(sum(event.distances_before or ()) / 2)) for event in memory.averagings]
    assert scalars["distance_around_averaging/before"] == before


def test_a_new_training_removes_older_events(tmp_path: Path) -> None:
    train(tmp_path, num_epochs=4)
    (tmp_path / "mine.txt").write_text("kept")
    memory = train(tmp_path, num_epochs=2)
    assert len(read(tmp_path)["learning_rate"]) == len(memory.epochs) == 2
    assert (tmp_path / "mine.txt").exists()


def test_soups_and_test_scores_are_written_if_they_were_evaluated(tmp_path: Path) -> None:
    score = Evaluation(loss=0.5, score=90.0)
    record = EpochRecord(
        epoch=1,
        step=3,
        lr=0.1,
        losses=[1.0],
        distances=[0.0],
        validation=EpochScores([score], score, score._replace(score=91.0)),
        test=EpochScores([score], score, score._replace(score=92.0)),
    )
    with EventFiles(tmp_path) as files:
        files.on_train_begin(SimpleNamespace(step=0))
        files.on_epoch_end(SimpleNamespace(), record)
    scalars = read(tmp_path)
    assert scalars["validation_score/average_soup"] == [(3, 91.0)]
    assert scalars["test_score/average_soup"] == [(3, 92.0)]
    assert scalars["test_score/mean"] == [(3, 90.0)]


class StopError(Exception):
    pass


class StopAt(Callback):
    """Stops a training in the middle, after saving its state."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        if training.step == self.step:
            self.saved = copy.deepcopy((training.step, shared_state(training), member_states(training)))

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.step + 3:
            raise StopError


def test_a_resumed_training_adds_to_its_events(tmp_path: Path) -> None:
    inputs = torch.randn(80, 4)

    def build() -> Training:
        return make_training(
            lambda: nn.Linear(4, 2),
            (inputs, (inputs.sum(dim=1) > 0).long()),
            num_members=2,
            num_epochs=4,
            batch_size=20,
            validation=0.25,
            rule=papa.Push(alpha=0.9, every_steps=1),
            loss=nn.functional.cross_entropy,
            metric=accuracy,
            make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
            schedule=cosine(),
            augment=None,
            prepare=lambda batch: batch,
            seed=1,
            device="cpu",
            numerics=Numerics(),
            eval_batch_size=64,
            group=None,
        )

    stop = StopAt(6)
    with pytest.raises(StopError), EventFiles(tmp_path) as files:
        build().run([files, stop])
    resumed = build()
    load_state_(resumed, *stop.saved)
    with EventFiles(tmp_path) as files:
        resumed.run([files])
    scalars = read(tmp_path)
    assert [step for step, _ in scalars["distance_around_averaging/after"]] == list(range(1, 13))
    assert [step for step, _ in scalars["learning_rate"]] == [3, 6, 9, 12]
