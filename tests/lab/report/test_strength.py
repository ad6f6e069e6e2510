"""The plots about the strength of averaging, and the advice in the progress of `papa.train`."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

import papa
from helpers import small_data, small_net
from papa.lab.report.figures import strength_figures
from papa.lab.report.metric import ACCURACY, TOKEN_LOSS
from papa.training.progress import Progress
from papa.verdict import TOO_CLOSE
from report_samples import make_epoch


def push(step: int, alpha: float | None, **more: Any) -> dict[str, Any]:
    return {"event": "average", "step": step, "alpha": alpha, **more}


def lines_of(
    epochs: list[dict[str, Any]], averagings: list[dict[str, Any]], metric: Any = ACCURACY
) -> dict[str, list[list[str]]]:
    """The numbers of each figure."""
    return {chart.name: list(chart.numbers[1]) for chart in strength_figures(epochs, averagings, metric)}


def test_half_lives_follow_from_what_members_kept() -> None:
    checks = [push(15, 0.25, member_loss=1.0, average_loss=0.5), push(20, 1.0), push(25, None)]
    found = lines_of([make_epoch(1)], [push(5, 0.5), push(10, 0.5), *checks])
    assert found["half-life"] == [["10", "5"], ["15", "2.5"]]
    assert found["checks"] == [["15", "1", "0.5"]]


def test_half_lives_that_grow_out_of_scale_are_left_out() -> None:
    alphas = [0.5, 0.5, 0.5, 0.6, 0.999]
    found = lines_of([], [push(5 * number, alpha) for number, alpha in enumerate(alphas)])["half-life"]
    assert [step for step, _ in found] == ["5", "10", "15"]


def test_the_gain_is_positive_where_the_average_is_better() -> None:
    epoch = make_epoch(1) | {"validation": [2.0, 3.0], "validation_average_soup": 2.25}
    assert lines_of([epoch], [])["gain"] == [["1", "-0.25"]]
    assert lines_of([epoch], [], TOKEN_LOSS)["gain"] == [["1", "0.25"]]
    assert "half-life" not in lines_of([epoch], [push(100, None)])


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        (papa.Push(alpha=0.0, every_steps=1, scale_by_lr=False), TOO_CLOSE),
        (papa.MergeAll(every_steps=1), None),
        (papa.AdaptivePush(), None),
    ],
)
def test_the_progress_of_a_training_advises(rule: papa.Rule, advice: str | None) -> None:
    file = io.StringIO()
    progress = Progress(is_live=False, file=file)
    outcome = papa.train(
        small_net, small_data(), num_members=2, num_epochs=2, batch_size=16, rule=rule, callbacks=[progress]
    )
    last = file.getvalue().splitlines()[-1]
    assert (f"({advice})" in last) == (advice is not None)
    assert math.isfinite(outcome.validation.mean)
    assert torch.isfinite(outcome.population.matrix).all()
