"""What a run ends with besides the outcome of its training."""

from __future__ import annotations

import pytest
from torch import nn

from helpers import small_data, small_training
from papa import Independent, MergeAll, Push, Rule
from papa.lab.config import AverageConfig, Config
from papa.lab.outcome import finalize_run
from papa.training import Repair


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3))


REPORT = {"repaired": [], "before_batch_norm": [], "scaled_only": ["0"], "left_alone": ["2"]}


@pytest.mark.parametrize(
    ("rule", "report"), [(MergeAll(every_steps=2), REPORT), (Independent(), REPORT), (Push(alpha=0.9), None)]
)
def test_the_outcome_says_what_repair_does_to_each_layer(rule: Rule, report: object) -> None:
    training = small_training(make_model=net, num_epochs=1, rule=rule, repair=Repair(num_batches=2))
    training.run()
    assert finalize_run(training, Config()).to_json()["repair"] == report


def test_soups_of_independent_members_are_repaired_and_aligned() -> None:
    training = small_training(data=small_data(900), num_epochs=6, rule=Independent())
    training.run()
    outcome = finalize_run(training, Config(average=AverageConfig(align_soups=True, align_batches=2)))
    assert outcome.repaired is not None
    best = max(member.score for member in outcome.training.validation.members)
    assert outcome.repaired.validation[1].score == outcome.repaired.greedy_score >= best
    assert outcome.repaired.validation[0].score > outcome.training.validation.average_soup.score
    assert set(outcome.repaired.greedy_members) <= {0, 1, 2}
    assert outcome.repaired.to_json().keys() == {"validation", "test", "greedy_members"}
    assert outcome.aligned is not None
    assert outcome.to_json()["similarity"] is None


def test_members_that_were_averaged_have_no_other_soups() -> None:
    training = small_training(num_epochs=1)
    training.run()
    outcome = finalize_run(training, Config(average=AverageConfig(align_soups=True)))
    assert outcome.repaired is outcome.aligned is outcome.trajectory is None
