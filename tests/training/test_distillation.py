"""Distillation: a network trained on the outputs of others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import papa
from helpers import assert_same_bits, small_data, small_net
from papa.errors import ConfigError
from papa.evaluation.scores import evaluating
from papa.training.distillation import distillation, match_probabilities

OPTIONS = {"num_epochs": 2, "batch_size": 20, "seed": 3}


def teacher() -> papa.Ensemble:
    torch.manual_seed(5)
    return papa.Ensemble([small_net() for _ in range(3)])


def test_the_divergence_is_0_for_equal_probabilities_and_has_the_gradient_of_soft_targets() -> None:
    torch.manual_seed(0)
    outputs, wanted = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    assert float(match_probabilities(wanted + 3.0, wanted)) == pytest.approx(0.0, abs=1e-6)
    (found,) = torch.autograd.grad(match_probabilities(outputs, wanted, temperature=1.0), outputs)
    (expected,) = torch.autograd.grad(F.cross_entropy(outputs, torch.softmax(wanted, dim=1)), outputs)
    torch.testing.assert_close(found, expected)
    along_last = match_probabilities(outputs.view(2, 3, 4), wanted.view(2, 3, 4), dim=-1)
    torch.testing.assert_close(along_last, match_probabilities(outputs, wanted))


def test_the_loss_is_the_weighted_sum_and_the_teacher_stays_as_it_was() -> None:
    ensemble, network, (inputs, targets) = teacher(), small_net(), small_data().train.batch(torch.arange(20))
    before = {name: value.clone() for name, value in ensemble.state_dict().items()}
    outputs = network(inputs)
    with evaluating(ensemble):
        parts = match_probabilities(outputs, ensemble(inputs)), F.cross_entropy(outputs, targets)
    for weight in (0.0, 0.3, 1.0):
        task = distillation(ensemble, papa.Task(), weight=weight)
        assert task.objective is not None
        expected = weight * parts[0] + (1.0 - weight) * parts[1]
        torch.testing.assert_close(task.objective(network, inputs, targets), expected)
    assert ensemble.training
    assert_same_bits(ensemble.state_dict(), before)


def test_without_the_teacher_it_is_plain_training() -> None:
    distilled = papa.distill(teacher(), small_net, small_data(), weight=0.0, **OPTIONS)  # type: ignore[arg-type]
    plain = papa.train(small_net, small_data(), num_members=1, rule=papa.Independent(), **OPTIONS)  # type: ignore[arg-type]
    assert_same_bits(distilled.average_soup.state_dict(), plain.average_soup.state_dict())


def test_a_student_comes_closer_to_its_teacher() -> None:
    ensemble, data = teacher(), small_data()
    inputs, _ = data.train.batch(torch.arange(len(data.train)))
    student = papa.distill(ensemble, small_net, data, weight=1.0, num_epochs=8, batch_size=20).average_soup
    torch.manual_seed(9)
    fresh = small_net()
    with torch.no_grad(), evaluating(ensemble), evaluating(fresh):
        found, start = (float(match_probabilities(net(inputs), ensemble(inputs))) for net in (student, fresh))
    assert found < 0.3 * start


def test_a_regression_is_matched_by_its_own_loss() -> None:
    inputs = torch.randn(60, 3)
    data, linear = (inputs, inputs.sum(dim=1, keepdim=True)), nn.Linear(3, 1)
    task = papa.Task(loss=F.mse_loss, metric=F.mse_loss, higher_is_better=False)
    found = papa.distill(
        linear,
        lambda: nn.Linear(3, 1),
        data,
        task=task,
        match=F.mse_loss,
        weight=1.0,
        num_epochs=20,
        batch_size=10,
        make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    )
    torch.testing.assert_close(found.average_soup.weight, linear.weight, rtol=0.1, atol=0.05)


def test_a_weight_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the weight of the teacher is 1.5, expected 0 to 1"):
        distillation(teacher(), papa.Task(), weight=1.5)
