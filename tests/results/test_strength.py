"""The study of the push that sets its own strength: its table agrees with its records, and it can be run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import papa
from papa.training.data import Arrays, Data
from results import strength
from results.record import read_file
from results.strength import AUTO, DESIGN, FILE, HELD_OUT, PAGE, Populations, jobs, page_with_tables, trained

TINY = replace(DESIGN[0], steps=32, batch_size=64)


def test_the_page_agrees_with_the_records() -> None:
    page = PAGE.read_text()
    assert page_with_tables(page) == page, "run `python -m results.strength write`"


def test_every_record_belongs_to_a_job_and_is_complete() -> None:
    expected = {name: (setting, rules) for setting, name, rules in jobs()}
    for name, record in read_file(FILE).items():
        setting, rules = expected[name]
        assert record["setting"] == setting.words
        assert list(record["scores"]) == list(rules)
        assert abs(record["steps"] - setting.steps) < 0.1 * setting.steps
        assert all(len(rows) == strength.NUM_POPULATIONS for rows in record["scores"].values())


def test_a_setting_without_a_record_is_not_run_yet(tmp_path: Path) -> None:
    assert strength.table("mean", 0, tmp_path / "none.jsonl").count("not run") == len(HELD_OUT) * len(strength.NAMES)


def test_held_out_settings_are_not_those_of_the_design() -> None:
    assert not {one.name for one in HELD_OUT} & {one.name for one in DESIGN}
    assert {one.steps for one in HELD_OUT} == {500, 2000, 8000}
    for setting in HELD_OUT:
        assert isinstance(setting.optimizer(setting.network()), torch.optim.Optimizer)


def test_populations_in_one_training_are_averaged_as_by_an_averager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only population of a training ends with the weights that `papa.train` gives."""
    monkeypatch.setattr(strength, "NUM_POPULATIONS", 1)
    rule = papa.AdaptivePush(every_steps=2, check_every=4)
    together: list[torch.Tensor] = []

    class Kept(Populations):
        def on_epoch_end(self, training: papa.training.Training, record: object) -> None:
            together[:] = [training.population.matrix.clone()]

    monkeypatch.setattr(strength, "Populations", Kept)
    found = trained(TINY, {AUTO: rule}, Path())
    (inputs, targets), test = TINY.load(Path())
    few = strength.NUM_VALIDATION
    data = Data(
        train=Arrays(inputs[few:], targets[few:]),
        validation=Arrays(inputs[:few], targets[:few]),
    )
    options = {"num_members": 4, "num_epochs": found["steps"] // (len(inputs[few:]) // 64), "batch_size": 64}
    outcome = papa.train(
        TINY.network,
        data,
        rule=rule,
        make_optimizer=TINY.optimizer,
        device="cpu",
        engine=papa.training.Stacked,
        verbose=False,
        **options,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(together[0], outcome.population.matrix, rtol=1e-4, atol=1e-5)
    (row,) = found["scores"][AUTO]
    assert row["half_lives"]
    assert row.keys() == {"mean", "ensemble", "average_soup", "half_lives"}
    assert len(test[0]) == 1197
