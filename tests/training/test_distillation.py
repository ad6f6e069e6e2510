"""Distillation: a network trained on the outputs of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import papa
from helpers import assert_same_bits, small_data, small_net
from papa.errors import ConfigError, DataError
from papa.evaluation.scores import evaluating
from papa.training.distillation import distillation, match_probabilities, mix_pairs

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
        task = distillation(ensemble, papa.Task(), weight=weight, match=match_probabilities)
        assert task.objective is not None
        expected = weight * parts[0] + (1.0 - weight) * parts[1]
        torch.testing.assert_close(task.objective(network, inputs, targets), expected)
    assert ensemble.training
    assert_same_bits(ensemble.state_dict(), before)


def test_without_the_teacher_it_is_plain_training() -> None:
    distilled = papa.distill(teacher(), small_net, small_data(), mix=False, weight=0.0, **OPTIONS)  # type: ignore[arg-type]
    plain = papa.train(small_net, small_data(), num_members=1, rule=papa.Independent(), **OPTIONS)  # type: ignore[arg-type]
    assert_same_bits(distilled.average_soup.state_dict(), plain.average_soup.state_dict())


@pytest.mark.parametrize("mix", [False, True])
def test_a_student_comes_closer_to_its_teacher(mix: bool) -> None:
    ensemble, data = teacher(), small_data()
    inputs, _ = data.train.batch(torch.arange(len(data.train)))
    student = papa.distill(ensemble, small_net, data, mix=mix, weight=1.0, num_epochs=8, batch_size=20).average_soup
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


def test_inputs_are_mixed_in_pairs_in_proportions_of_their_own() -> None:
    inputs = torch.eye(50)
    found = mix_pairs(inputs, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.sum(dim=1), torch.ones(50))
    assert set(found.count_nonzero(dim=1).tolist()) <= {1, 2}
    shares = found.diagonal()
    assert len(shares.unique()) == 50
    assert 0.35 < float(shares.mean()) < 0.65
    torch.testing.assert_close(mix_pairs(inputs.double(), torch.Generator().manual_seed(0)), found.double())


def test_teacher_and_student_see_the_same_mixed_inputs_after_augmentation() -> None:
    seen: list[list[torch.Tensor]] = [[], []]

    class Watched(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.net, self.place = small_net(), place

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() or self.place == 0:
                seen[self.place].append(inputs)
            return self.net(inputs)

    def augment(inputs: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> tuple:
        return torch.full_like(inputs, float(torch.rand((), generator=generator))), targets

    transforms = papa.training.Transforms(augment=augment)
    papa.distill(Watched(0), lambda: Watched(1), small_data(), transforms=transforms, num_epochs=1, batch_size=20)
    students = [inputs for inputs in seen[1] if inputs.std() == 0]
    assert len(students) > 2
    assert all(any(torch.equal(inputs, one) for one in seen[0]) for inputs in students)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 1.5, "mix": False}, "the weight of the teacher is 1.5, expected 0 to 1"),
        ({"weight": 0.5}, "the weight of the teacher is 0.5, but mixed inputs have no targets: pass mix=False"),
    ],
)
def test_wrong_weights_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        papa.distill(teacher(), small_net, small_data(), num_epochs=1, **options)


def test_tokens_cannot_be_mixed() -> None:
    data = torch.randint(7, (40, 5)), torch.randint(2, (40,))
    net = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 2))
    with pytest.raises(DataError, match=r"inputs to mix are torch.int64, .*: pass mix=False"):
        papa.distill(net, lambda: net, data, num_epochs=1, batch_size=10)
