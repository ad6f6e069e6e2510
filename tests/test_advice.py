"""Advice about the strength, and the push that sets its own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import papa
from papa.advice import GOOD, TOO_CLOSE, TOO_FAR, advice_from_scores
from papa.core.rules import AveragingContext
from papa.errors import DataError, MixingError


def line(weight: float) -> nn.Module:
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, weight)
    return network


ONES = (torch.ones(4, 1), torch.ones(4, 1))


def square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


@pytest.mark.parametrize(
    ("weights", "advice"),
    [((0.5, 1.5), GOOD), ((1.5, 1.5), TOO_CLOSE), ((-1.0, -1.001), TOO_CLOSE)],
)
def test_the_advice_compares_average_and_members(weights: tuple[float, ...], advice: str) -> None:
    population = papa.Population([line(weight) for weight in weights])
    found = papa.diagnose(population, [ONES], square)
    mean = sum(weights) / len(weights)
    assert found.member_losses == pytest.approx([(weight - 1) ** 2 for weight in weights], rel=1e-6)
    assert found.average_loss == pytest.approx((mean - 1) ** 2, abs=1e-6)
    assert found.spread == pytest.approx(
        math.sqrt(sum((weight - mean) ** 2 for weight in weights) / len(weights)) / abs(mean), abs=1e-6
    )
    assert found.advice == advice
    assert str(found).endswith(advice)


def test_an_average_that_is_worse_than_its_members_is_reported() -> None:
    """|w| = 1 is best, so that the mean of 1 and -1 is bad."""
    population = papa.Population([line(1.0), line(-0.9)])
    found = papa.diagnose(population, [ONES], lambda outputs, targets: square(outputs.abs(), targets))
    assert found.advice == TOO_FAR


def test_a_probe_scores_in_evaluation_mode_and_restores_the_mode() -> None:
    network = nn.Sequential(line(2.0), nn.Dropout(0.5))
    network.train()
    probe = papa.loss_probe(lambda: [ONES, ONES], square)
    assert probe(network) == pytest.approx(1.0)
    assert network.training
    with pytest.raises(DataError, match="at least one batch, got none"):
        papa.loss_probe([], square)(network)


def losses(step: int, members: tuple[float, ...], average: float, state: dict[str, object]) -> AveragingContext:
    return AveragingContext(
        step=step, size=len(members), lr_ratio=1.0, previous=step - 5, losses=members, mean_loss=average, state=state
    )


def test_the_half_life_grows_while_the_average_is_better_and_halves_when_it_is_worse() -> None:
    rule = papa.AdaptivePush(lambda network: 0.0, growth=0.5)
    state = rule.initial_state(2)
    assert rule.keep(losses(5, (2.0, 2.0), 2.0, state)) == pytest.approx(0.5 ** (5 / 20))
    seen = []
    for step, average in ((50, 2.0), (100, 1.0), (150, 1.0), (200, 1.5), (250, 1.0)):
        members = (2.0, 2.0) if step == 50 else (1.1, 1.3)
        state = dict(rule.next_state(losses(step, members, average, state)))
        seen.append(state["half_life"])
    # Near chance nothing changes; then 0.5 steps per step; halved once.
    assert seen == [20.0, 45.0, 70.0, 35.0, 60.0]
    assert (state["first_loss"], state["member_loss"], state["average_loss"]) == (2.0, pytest.approx(1.2), 1.0)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_only_the_sign_of_the_difference_counts(scale: float) -> None:
    rule = papa.AdaptivePush(lambda network: 0.0)
    state = rule.initial_state(2)
    for step, members, average in ((50, (2.0, 4.0), 3.5), (100, (1.0, 2.0), 1.2), (150, (0.5, 0.7), 0.9)):
        scaled = tuple(scale * loss for loss in members)
        state = dict(rule.next_state(losses(step, scaled, scale * average, state)))
    assert state["half_life"] == pytest.approx((20 + 0.2 * 50) / 2)


def test_losses_that_are_not_finite_make_the_push_stronger() -> None:
    rule = papa.AdaptivePush(lambda network: 0.0)
    state = {**rule.initial_state(2), "half_life": 40.0, "first_loss": 2.0}
    for members, average in (((1.0, math.inf), math.nan), ((math.nan, 1.0), math.inf)):
        found = rule.next_state(losses(50, members, average, state))
        assert found["half_life"] == 20.0
        assert found["average_loss"] is None


def test_it_checks_only_now_and_then() -> None:
    rule = papa.AdaptivePush(lambda network: 0.0, every_steps=5, check_every=20)
    looked = [step for step in range(5, 65, 5) if rule.is_check(losses(step, (1.0,), 1.0, {}))]
    assert looked == [20, 40, 60]
    state = rule.initial_state(1)
    assert rule.next_state(AveragingContext(step=5, size=1, lr_ratio=1.0, state=state)) == state
    with pytest.raises(MixingError, match=r"growth=0\.0, expected a positive number"):
        papa.AdaptivePush(lambda network: 0.0, growth=0.0)


def test_it_starts_with_a_half_life_that_suits_the_length_of_training() -> None:
    rule = papa.AdaptivePush(lambda network: 0.0)
    starts = [rule.for_length(length).half_life_steps for length in (None, 10_000, 320, 10)]
    assert starts == pytest.approx([20.0, 20.0, 9.6, 1.25])


def test_without_a_probe_it_says_what_it_needs() -> None:
    with pytest.raises(MixingError, match=r"None as its probe, expected .* one with papa\.loss_probe\(batches, loss\)"):
        papa.Averager(papa.Population([line(1.0), line(2.0)]), papa.AdaptivePush())


@pytest.mark.parametrize(
    ("members", "average", "spread", "advice"),
    [
        ((90.0, 91.0), 89.0, 0.1, TOO_FAR),
        ((90.0, math.nan, 91.0), 90.5, 0.1, None),
        ((90.0, 91.0), math.nan, None, TOO_FAR),
        ((90.0, 91.0), 90.5, 0.0001, TOO_CLOSE),
        ((90.0,), 10.0, 0.1, None),
    ],
)
def test_scores_of_an_epoch_lead_to_advice(
    members: tuple[float, ...], average: float, spread: float | None, advice: str | None
) -> None:
    assert advice_from_scores(members, average, spread=spread) == advice
    reversed_scores = [-score for score in members]
    assert advice_from_scores(reversed_scores, -average, spread=spread, higher_is_better=False) == advice


def test_members_come_together_and_stay_good_on_average() -> None:
    """Two layers from different initial weights: without a push their mean is bad, with this rule it is good."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = (inputs[:, :4].sum(1) * inputs[:, 4:].sum(1) > 0).long()

    def trained(rule: papa.Rule) -> papa.Diagnosis:
        population = papa.Population.build(
            lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), 3, seed=1
        )
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9) for net in population]
        averager = papa.Averager(population, rule, optimizers, num_steps=300)
        generator = torch.Generator().manual_seed(1)
        for _ in range(300):
            for net, optimizer in zip(population, optimizers, strict=True):
                chosen = torch.randint(256, (32,), generator=generator)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
            averager.step()
        return papa.diagnose(population, [(inputs, targets)], nn.functional.cross_entropy)

    probe = papa.loss_probe([(inputs, targets)], nn.functional.cross_entropy)
    assert trained(papa.Independent()).advice == TOO_FAR
    assert trained(papa.AdaptivePush(probe, check_every=20)).average_loss < 0.25


def test_a_resumed_averager_continues_with_its_half_life() -> None:
    def made() -> papa.Averager:
        population = papa.Population([line(1.0 + member) for member in range(3)])
        return papa.Averager(
            population, papa.AdaptivePush(papa.loss_probe([ONES], square), every_steps=1, check_every=1)
        )

    whole, begun, resumed = made(), made(), made()
    for _ in range(6):
        whole.step()
    for _ in range(3):
        begun.step()
    for ours, theirs in zip(begun.population, resumed.population, strict=True):
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    resumed.load_state_dict(begun.state_dict())
    for _ in range(3):
        resumed.step()
    assert resumed.rule_state == whole.rule_state
    assert torch.equal(resumed.population.matrix, whole.population.matrix)
