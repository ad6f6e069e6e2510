"""The average soup while it trains: scored every epoch, and the best kept on request."""

from __future__ import annotations

import pytest
import torch

from helpers import assert_same_bits, small_training
from papa import Push, average_soup
from papa.errors import ConfigError
from papa.training import BestSoup, Callback, EpochRecord, Monitoring, Training, finalize


class Epochs(Callback):
    """Keeps every record, and the soup of every epoch."""

    def __init__(self) -> None:
        self.records: list[EpochRecord] = []
        self.soups: list[torch.nn.Module] = []

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.records.append(record)
        self.soups.append(average_soup(training.population))


@pytest.mark.parametrize("test_each_epoch", [False, True])
def test_every_epoch_scores_the_average_soup(test_each_epoch: bool) -> None:
    training, epochs = small_training(rule=Push(alpha=0.8, every_steps=2), test_each_epoch=test_each_epoch), Epochs()
    training.run([epochs])
    test = training.data.test
    assert test is not None
    for record, soup in zip(epochs.records, epochs.soups, strict=True):
        assert record.validation.average_soup == training.evaluate([soup], training.data.validation)[0][0]
        assert (record.test is not None) == test_each_epoch
        if record.test is not None:
            assert record.test.average_soup == training.evaluate([soup], test)[0][0]
            assert len(record.test.members) == 3


def test_scoring_the_soup_changes_no_bit() -> None:
    plain, watched = small_training(), small_training(test_each_epoch=True, keep_best_soup=True)
    plain.run()
    watched.run([Epochs()])
    for found, expected in zip(watched.population, plain.population, strict=True):
        assert_same_bits(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("every", [2, 3, 9])
def test_scoring_fewer_epochs_gives_the_same_records_of_these_and_the_same_weights(every: int) -> None:
    each, some = Epochs(), Epochs()
    plain, training = small_training(num_epochs=5), small_training(num_epochs=5, validate_every=every)
    plain.run([each])
    training.run([some])
    assert [record.epoch for record in some.records] == sorted({*range(every, 6, every), 5})
    assert some.records == [each.records[record.epoch - 1] for record in some.records]
    for found, expected in zip(training.population, plain.population, strict=True):
        assert_same_bits(found.state_dict(), expected.state_dict())


def test_epochs_between_scores_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="validate_every is 0, expected a number of epochs, at least 1"):
        Monitoring(validate_every=0)


def test_the_best_soup_is_that_of_the_best_epoch() -> None:
    training, epochs = small_training(keep_best_soup=True, num_epochs=6), Epochs()
    training.run([epochs])
    kept = finalize(training).best_soup
    assert kept is not None
    keys = [(record.validation.average_soup.score, -record.validation.average_soup.loss) for record in epochs.records]
    assert kept.epoch == 1 + keys.index(max(keys))
    assert_same_bits(kept.network.state_dict(), epochs.soups[kept.epoch - 1].state_dict())
    assert kept.validation == epochs.records[kept.epoch - 1].validation.average_soup
    assert kept.test is not None
    assert not kept.network.training
    assert kept.to_json()["epoch"] == kept.epoch


def test_the_last_soup_stays_the_result() -> None:
    training = small_training(keep_best_soup=True)
    training.run()
    assert_same_bits(finalize(training).average_soup.state_dict(), average_soup(training.population).state_dict())
    assert finalize(small_training()).best_soup is None


def test_a_best_soup_needs_an_epoch() -> None:
    best = BestSoup()
    best.setup(small_training())
    assert best.epoch == 0
