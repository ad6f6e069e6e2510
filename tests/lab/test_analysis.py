import copy

import pytest
import torch
from torch import nn

from helpers import assert_same_bits, small_training, snapshot
from papa import Independent, MergeAll, aligned_soups, average_soup, feature_similarity
from papa.align import align_
from papa.lab.analysis import analyse, layers_to_compare
from papa.lab.config import AverageConfig, Config
from papa.lab.models import make_model
from papa.lab.outcome import aligned_and_repaired_soups, finalize_run
from papa.repair import repair_
from papa.training import Training


def trained(rule: object = Independent(), **changes: object) -> Training:
    training = small_training(rule=rule, num_epochs=6, **changes)
    training.run()
    return training


@pytest.fixture(scope="module")
def independent() -> Training:
    return trained()


def test_merged_members_are_more_similar(independent: Training) -> None:
    merged = trained(MergeAll(every_steps=5))
    first, second = (analyse(training, num_align_batches=3) for training in (independent, merged))
    assert first is not None
    assert second is not None
    for one, other in zip(first.similarity.members, second.similarity.members, strict=True):
        assert one < other
    assert first.curves["plain"].barrier > second.curves["plain"].barrier


def test_matching_units_increases_similarity_and_changes_no_member(independent: Training) -> None:
    before = [snapshot(net) for net in independent.population]
    analysis = analyse(independent, num_align_batches=3)
    for net, state in zip(independent.population, before, strict=True):
        assert_same_bits(snapshot(net), state)
    assert analysis is not None
    assert analysis.matched_similarity is not None
    assert analysis.matched_similarity.members[0] > analysis.similarity.members[0]
    # the output layer has no units to match
    assert analysis.matched_similarity.members[-1] == pytest.approx(analysis.similarity.members[-1], abs=1e-6)


def test_similarity_is_the_mean_over_pairs_and_over_members(independent: Training) -> None:
    analysis = analyse(independent, num_members=2, num_align_batches=3)
    networks = [*list(independent.population)[:2], average_soup(list(independent.population)[:2])]
    expected = feature_similarity(networks, independent.batches.plain(5))
    assert analysis is not None
    assert analysis.similarity.layers == ("0", "3")
    for number, matrix in enumerate(expected.values()):
        assert analysis.similarity.members[number] == pytest.approx(float(matrix[0, 1]))
        assert analysis.similarity.soup[number] == pytest.approx(float((matrix[2, 0] + matrix[2, 1]) / 2))


def test_the_result_holds_similarity_and_four_curves(independent: Training) -> None:
    result = finalize_run(independent, Config(analysis=True, average=AverageConfig(align_batches=3))).to_json()
    assert result["similarity"].keys() == {"layers", "members", "soup", "matched", "plain"}
    assert result["similarity"]["matched"]
    assert result["interpolation"]["pair"] == [0, 1]
    names = [curve["name"] for curve in result["interpolation"]["curves"]]
    assert names == ["plain", "aligned", "repaired", "aligned and repaired"]
    for curve in result["interpolation"]["curves"]:
        assert len(curve["coefficients"]) == len(curve["score"]) == len(curve["loss"]) == 11
    assert finalize_run(independent, Config()).to_json()["similarity"] is None


class Unexportable(nn.Module):
    """Cannot be exported, because it branches on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(torch.relu(hidden) if float(hidden.detach().sum()) > -1e9 else hidden)


def test_a_network_that_cannot_be_exported_is_compared_without_matching_and_a_warning_says_so() -> None:
    training = small_training(make_model=Unexportable, rule=Independent(), num_epochs=1)
    training.run()
    with pytest.warns(UserWarning, match="units of Unexportable are not matched"):
        analysis = analyse(training, num_align_batches=2)
    assert analysis is not None
    assert not analysis.to_json()["similarity"]["matched"]
    assert list(analysis.curves) == ["plain", "repaired"]
    with pytest.warns(UserWarning, match="units of Unexportable are not matched"):
        assert aligned_and_repaired_soups(training, 2) is None


def test_a_diverged_member_costs_the_comparison_and_not_the_result() -> None:
    training = small_training(rule=Independent(), num_epochs=1, repair=None)
    training.run()
    training.population[1].get_parameter("0.weight").data[0] = float("nan")
    with (
        pytest.warns(UserWarning, match="the average soup has NaN, from member 1"),
        pytest.warns(UserWarning, match="members are not compared: layer '0' of network 1 has outputs that are not"),
    ):
        assert finalize_run(training, Config(analysis=True)).to_json()["similarity"] is None


def test_one_member_is_not_compared() -> None:
    assert analyse(small_training(num_members=1)) is None


def test_stages_are_compared_if_a_network_has_them() -> None:
    resnet = make_model("resnet18", num_classes=10, width=4)
    assert layers_to_compare(resnet) == ["stages.0", "stages.1", "stages.2", "stages.3"]
    assert layers_to_compare(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == ["0", "2"]


def test_aligned_soups_add_members_best_first_each_aligned_to_the_soup(independent: Training) -> None:
    inputs = independent.batches.plain(3)
    found = aligned_and_repaired_soups(independent, 3)
    soups = aligned_soups(
        independent.population,
        lambda net: independent.evaluate([net], independent.data.validation)[0][0],
        inputs,
        by="activations",
        repair_batches=inputs[:2],
    )
    readings = independent.evaluate_population(independent.data.validation)[0]
    order = sorted(range(3), key=lambda member: (-readings[member].score, readings[member].loss))
    parents = [copy.deepcopy(independent.population[order[0]])]
    mean = soup = parents[0]
    for member in order[1:]:
        joining = copy.deepcopy(independent.population[member])
        align_(joining, mean, inputs, by="activations")
        parents.append(joining)
        mean, soup = average_soup(parents), average_soup(parents)
        repair_(soup, parents, inputs[:2])
    for name, value in snapshot(soup).items():
        torch.testing.assert_close(snapshot(soups.average)[name], value, rtol=1e-4, atol=1e-5)
    best = max(reading.score for reading in readings)
    assert soups.greedy.score >= best
    assert soups.greedy.members[0] == order[0]
    assert found is not None
    assert found.validation[1].score == pytest.approx(soups.greedy.score)
    assert found.greedy_members == soups.greedy.members


def test_aligned_soups_beat_repaired_and_plain_ones(independent: Training) -> None:
    outcome = finalize_run(independent, Config(average=AverageConfig(align_soups=True, align_batches=3)))
    assert outcome.aligned is not None
    assert outcome.repaired is not None
    losses = [outcome.aligned.validation[0].loss, outcome.repaired.validation[0].loss]
    assert losses == sorted(losses)
    assert outcome.to_json()["aligned"].keys() == {"validation", "test", "greedy_members"}
    assert finalize_run(independent, Config()).aligned is None
