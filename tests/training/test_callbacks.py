"""What callbacks are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import papa
from papa.training import Callback, EpochRecord, Log, Monitoring, Training
from papa.training.data import Arrays, Data


class Records(Callback):
    def __init__(self) -> None:
        self.epochs: list[EpochRecord] = []
        self.averagings: list[papa.Averaging] = []

    def on_averaging(self, training: Training, averaging: papa.Averaging) -> None:
        self.averagings.append(averaging)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.epochs.append(record)


def test_a_function_is_given_all_numbers_with_their_step() -> None:
    logged: dict[str, dict[int, float]] = {}

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            logged.setdefault(name, {})[step] = value

    inputs, records = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), Records()
    arrays = Arrays(inputs, (inputs.sum(dim=1) > 0).long())
    papa.train(
        lambda: nn.Linear(4, 2),
        Data(train=arrays, validation=arrays, test=arrays),
        num_members=2,
        num_epochs=4,
        batch_size=20,
        rule=papa.Push(alpha=0.9, every_steps=2),
        monitoring=Monitoring(test_each_epoch=True),
        callbacks=[Log(log), records],
    )
    epochs = records.epochs
    assert [record.step for record in epochs] == [3, 6, 9, 12]
    for name, values in {
        "loss/member_1": [record.losses[1] for record in epochs],
        "validation_score/member_0": [record.validation.members[0].score for record in epochs],
        "validation_score/ensemble": [record.validation.ensemble.score for record in epochs],
        "test_score/average_soup": [record.test.average_soup.score for record in epochs if record.test is not None],
        "test_loss/mean": [
            sum(m.loss for m in record.test.members) / 2 for record in epochs if record.test is not None
        ],
        "distance_to_mean/mean": [sum(record.distances) / 2 for record in epochs],
        "learning_rate": [record.lr for record in epochs],
    }.items():
        assert logged[name] == pytest.approx(dict(zip([3, 6, 9, 12], values, strict=True)))
    assert logged["papa/distance_before"] == pytest.approx(
        {one.step: sum(one.distances_before or ()) / 2 for one in records.averagings}
    )
    assert list(logged["papa/distance_after"]) == [2, 4, 6, 8, 10, 12]
