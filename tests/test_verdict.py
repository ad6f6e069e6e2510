"""Advice about the strength, and the push that sets its own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import papa
from papa.core.rules import AveragingContext
from papa.errors import DataError, MixingError
from papa.evaluation.scores import Evaluation
from papa.verdict import TOO_CLOSE, TOO_FAR, advice_from_scores, verdict


def line(weight: float) -> nn.Module:
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, weight)
    return network


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * inputs


ONES = (torch.ones(4, 1), torch.ones(4, 1))


def square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


NOISY_ONES = torch.ones(400, 1), 1.0 + 0.1 * torch.randn(400, 1, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("weights", "rule", "kind", "advice"),
    [
        ((0.5, 1.5), papa.Push(half_life=0.02), "helps", "Keep the strength."),
        ((1.0, 1.001), papa.Push(half_life=0.02), "too close", "a weaker averaging, such as half_life=0.06, keeps"),
        ((1.0, 1.001), papa.MergeAll(every_steps=10), "too close", "such as every_steps=30, keeps more."),
        ((1.0, 1.001), papa.SparseAverage(share=0.06), "too close", "such as share=0.02, keeps more."),
        ((1.0, 1.001), papa.Push(half_life=0.2), "nothing to gain", "more members will not help."),
        ((1.0, 1.001), papa.Independent(), "nothing to gain", "more members will not help."),
        ((1.0, 1.001), None, "too close", "push less."),
    ],
)
def test_the_verdict_follows_from_losses_and_strength(
    weights: tuple[float, ...], rule: papa.Rule | None, kind: str, advice: str
) -> None:
    population = papa.Population([line(weight) for weight in weights])
    found = papa.diagnose(population, [NOISY_ONES], square, rule=rule, num_steps=1000)
    mean = sum(weights) / len(weights)
    losses = [float((weight - NOISY_ONES[1]).square().mean()) for weight in weights]
    assert found.member_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.best_member_loss == pytest.approx(min(losses), rel=1e-5)
    assert found.average_loss == pytest.approx(float((mean - NOISY_ONES[1]).square().mean()), rel=1e-5)
    assert found.ensemble_loss == pytest.approx(found.average_loss, rel=1e-5)  # of linear networks
    assert found.gain.mean == pytest.approx(found.member_loss - found.average_loss, abs=1e-7)
    assert found.spread == pytest.approx(
        math.sqrt(sum((weight - mean) ** 2 for weight in weights) / len(weights)) / mean, rel=1e-3
    )
    assert (found.kind, found.num_examples) == (kind, 400)
    assert advice in str(found)


def of_size(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """|w| = 1 is best, so that the mean of 1 and -1 is bad."""
    return square(outputs.abs(), targets)


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        (papa.Push(half_life=0.06), "a stronger averaging, such as half_life=0.02, brings them together."),
        (papa.Push(half_life_steps=30), "such as half_life=0.01, brings"),
        (papa.MergePairs(every_steps=30), "such as every_steps=10, brings"),
        (papa.PushPull(spread=3.0), "such as spread=1, brings"),
        (papa.Shuffle(share=0.01), "such as share=0.03, brings"),
        (papa.MergeAll(every_steps=1), "they are averaged as often as can be"),
        (papa.Independent(), "they were trained independently."),
    ],
)
def test_members_that_are_too_far_apart_get_the_option_of_their_rule(rule: papa.Rule, advice: str) -> None:
    population = papa.Population([line(1.0), line(-0.9)])
    found = papa.diagnose(population, [NOISY_ONES], of_size, rule=rule, num_steps=1000)
    assert found.kind == "too far"
    assert advice in found.advice


def test_without_a_number_of_steps_advice_is_in_steps() -> None:
    population = papa.Population([line(1.0), line(-0.9)])
    found = papa.diagnose(population, NOISY_ONES, of_size, rule=papa.Push(half_life_steps=30))
    assert "half_life_steps=10" in found.advice


def test_a_difference_is_told_from_noise_by_pairs_of_examples() -> None:
    """The same mean difference of 10%: alike on all examples, or lost among the differences of single examples."""
    generator = torch.Generator().manual_seed(0)
    common, own = 1.0 + torch.rand(100, generator=generator), 4 * torch.randn(100, generator=generator)
    own -= own.mean()

    def kind_of(average: torch.Tensor) -> str:
        members = [Evaluation(0.0, 0.0, losses=common + one) for one in (0.1, -0.1)]
        alike = Evaluation(0.0, 0.0, losses=common)
        rule = papa.Push(half_life=0.01)
        return verdict(members, Evaluation(0.0, 0.0, losses=average), alike, spread=0.1, rule=rule, num_steps=100).kind

    assert kind_of(common - 0.15) == "helps"
    assert kind_of(common - 0.15 + own) == "too close"
    assert kind_of(common - 0.001) == "too close"
    assert kind_of(common + 0.15) == "too far"
    assert kind_of(torch.full((100,), math.nan)) == "too far"
    with pytest.raises(DataError, match="evaluate with keep_losses=True"):
        verdict([Evaluation(0.0, 0.0)], Evaluation(0.0, 0.0), Evaluation(0.0, 0.0), spread=0.1)


def test_losses_of_classes_are_compared_at_the_temperature_of_each_network() -> None:
    """A network that is only too sure of itself is no worse."""
    logits = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.distributions.Categorical(logits=logits).sample()
    found = papa.diagnose(papa.Population([Scaled(1.0), Scaled(3.0)]), [(logits, targets)])
    assert found.average_loss == pytest.approx(found.member_loss, rel=2e-3)
    assert found.kind == "too close"


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

    def trained(rule: papa.Rule) -> papa.Verdict:
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
    assert trained(papa.Independent()).kind == "too far"
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
