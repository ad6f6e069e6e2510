"""Numbers that drift are caught: short runs of every method end as they did when their numbers were stored."""

from __future__ import annotations

import json

import pytest

from fixed_runs import RUNS, STORED, differences, numbers_of

NUMBERS = json.loads(STORED.read_text())


def test_every_run_has_stored_numbers() -> None:
    assert NUMBERS.keys() == RUNS.keys()


@pytest.mark.filterwarnings("ignore::papa.PapaWarning")
@pytest.mark.parametrize("name", RUNS)
def test_a_short_run_ends_with_the_stored_numbers(name: str) -> None:
    assert differences(name, numbers_of(RUNS[name]()), NUMBERS) is None
