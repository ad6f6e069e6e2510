"""The studies with trainings of their own: records belong to their settings, and a few steps of each run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from papa.errors import RunError
from results import strength, text_pushes
from results.record import read_file
from results.text_pushes import VARIANTS


def test_every_record_of_the_strengths_belongs_to_a_setting_and_is_complete() -> None:
    found = read_file(strength.FILE)
    assert set(found) == {f"{name}{end}" for name in strength.SETTINGS for end in strength.JOBS}
    for name, setting in strength.SETTINGS.items():
        for end, rules in strength.JOBS.items():
            record = found[f"{name}{end}"]
            assert record["setting"] == setting.words
            assert list(record["scores"]) == list(rules)
            assert abs(record["steps"] - setting.steps) < 0.1 * setting.steps
            assert all(len(rows) == strength.NUM_POPULATIONS for rows in record["scores"].values())


def test_a_setting_without_a_record_is_not_run_yet(tmp_path: Path) -> None:
    assert strength.table("mean", 0, tmp_path / "none.jsonl").count("not run") == 4 * 8


def test_a_few_steps_with_each_kind_of_rule_give_scores() -> None:
    tiny = strength.SETTINGS["cancer"]._replace(steps=20)
    found = strength.trained(tiny, {"0.1%": strength.FIXED["0.1%"], **strength.JOBS["-auto"]}, Path())
    assert list(found["scores"]) == ["0.1%", "papa-auto"]
    assert all(row.keys() == {"mean", "ensemble", "average_soup"} for rows in found["scores"].values() for row in rows)


@pytest.mark.parametrize("name", ["moments", "no-norms", "parts", "shuffled", "sgd"])
def test_a_few_steps_of_a_text_variant_give_finite_losses(name: str) -> None:
    codes = torch.randint(11, (text_pushes.TRAIN + 2 * text_pushes.HELD_OUT,))[: text_pushes.TRAIN + 100]
    networks, last = text_pushes.population(replace(VARIANTS[name], steps=5, size=2), codes, 11, 1)
    assert math.isfinite(last)
    assert all(map(math.isfinite, text_pushes.scores(networks, codes[:200]).values()))


def test_a_push_keeps_the_mean_and_shrinks_differences() -> None:
    members = [torch.randn(3, 4), torch.randn(3, 4)]
    before = [member.clone() for member in members]
    text_pushes.push_(members, 0.75)
    torch.testing.assert_close(members[0] + members[1], before[0] + before[1])
    torch.testing.assert_close(members[0] - members[1], 0.75 * (before[0] - before[1]))


def test_a_shuffle_permutes_members_in_each_column() -> None:
    members = [torch.randn(30, 4) for _ in range(3)]
    before = torch.stack(members)
    text_pushes.shuffle_(members, 0.5, torch.Generator().manual_seed(1))
    after = torch.stack(members)
    assert torch.equal(after.sort(dim=0).values, before.sort(dim=0).values)
    assert not torch.equal(after, before)


def test_members_are_pushed_within_their_share_of_training_only() -> None:
    variant = text_pushes.Variant(words="a part", half_life=0.1, ends=0.5, steps=100)
    pushed = [step for step in range(5, 101, 5) if text_pushes.keep(variant, step, 1.0) < 1.0]
    assert pushed == list(range(5, 51, 5))


def test_a_text_that_is_missing_or_too_short_and_an_unknown_variant_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: No such file"):
        text_pushes.run(tmp_path / "none.txt", [])
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(RunError, match="too short: 55,000 characters"):
        text_pushes.run(tmp_path / "short.txt", [])
    with pytest.raises(RunError, match="there is no variant momets: did you mean moments"):
        text_pushes.run(tmp_path / "short.txt", ["momets"])
