from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import make_networks
from papa.core.soups import Ensemble
from papa.errors import DataError
from papa.evaluation.classification import accuracy
from papa.evaluation.scores import Evaluation, evaluate, evaluate_together, evaluating


def uneven_batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, 2, 4, 4), torch.randint(3, (size,))) for size in (5, 2, 1)]


def whole(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


def expected_evaluation(network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Evaluation:
    inputs, targets = whole(batches)
    outputs = network.eval()(inputs)
    correct = (outputs.argmax(dim=1) == targets).float().mean()
    return Evaluation(100 * correct.item(), F.cross_entropy(outputs, targets).item())


def assert_alike(found: Evaluation, expected: Evaluation) -> None:
    assert (found.score, found.loss) == pytest.approx((expected.score, expected.loss), rel=1e-5)


def test_accuracy_is_a_percentage() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert accuracy(outputs, torch.tensor([0, 1, 1, 1])).item() == 75.0


def test_batches_count_by_their_size() -> None:
    batches = uneven_batches()
    (network,) = make_networks("conv_batch_norm", 1)
    assert_alike(evaluate(network, batches), expected_evaluation(network, batches))


def test_each_network_and_the_ensemble_in_one_pass() -> None:
    batches = uneven_batches()
    networks = make_networks("conv_batch_norm", 3)
    each, together = evaluate_together(networks, iter(batches))
    for network, evaluation in zip(networks, each, strict=True):
        assert_alike(evaluation, expected_evaluation(network, batches))
    assert_alike(together, expected_evaluation(Ensemble(networks), batches))


def test_other_losses_and_metrics() -> None:
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(2)]
    (network,) = make_networks("linear", 1)

    def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).abs().mean()

    found = evaluate(network, batches, loss=F.mse_loss, metric=closeness)
    inputs, targets = whole(batches)
    assert found.loss == pytest.approx(F.mse_loss(network(inputs), targets).item(), rel=1e-5)
    assert found.score == pytest.approx(closeness(network(inputs), targets).item(), rel=1e-5)


def test_a_metric_may_return_a_plain_number_but_only_one() -> None:
    inputs, targets = torch.randn(10, 3), torch.randn(10, 2)
    network = nn.Linear(3, 2)
    batches = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    loss = nn.functional.mse_loss
    plain = evaluate(network, batches, loss=loss, metric=lambda found, wanted: -loss(found, wanted).item())
    tensor = evaluate(network, batches, loss=loss, metric=lambda found, wanted: -loss(found, wanted))
    assert plain.score == pytest.approx(tensor.score)
    with pytest.raises(DataError, match=r"returned numbers of shape \(6,\), expected one for a batch: take their mean"):
        evaluate(network, batches, loss=loss, metric=lambda found, wanted: (found - wanted).square().mean(dim=1))


def test_modes_statistics_and_gradients_are_restored() -> None:
    (network,) = make_networks("conv_batch_norm", 1)
    network.train()
    network.get_submodule("1").eval()
    modes = [module.training for module in network.modules()]
    statistics = network.get_buffer("1.running_mean").clone()
    network.get_submodule("1").train()
    modes[2] = True
    evaluate(network, uneven_batches())
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(network.get_buffer("1.running_mean"), statistics)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_evaluating_restores_every_submodules_own_mode_after_an_error() -> None:
    (network,) = make_networks("conv_batch_norm", 1)
    network.get_submodule("1").eval()
    modes = [module.training for module in network.modules()]
    inside: list[bool] = []
    with pytest.raises(ZeroDivisionError):
        fail_while_evaluating(network, inside)
    assert inside == [False] * len(modes)
    assert [module.training for module in network.modules()] == modes
    assert any(modes)
    assert not all(modes)


def fail_while_evaluating(network: nn.Module, inside: list[bool]) -> None:
    with evaluating(network):
        inside.extend(module.training for module in network.modules())
        raise ZeroDivisionError


def test_half_precision_outputs_are_averaged_in_single() -> None:
    networks = [nn.Linear(4, 3).bfloat16() for _ in range(2)]
    inputs, targets = torch.randn(8, 4).bfloat16(), torch.randint(3, (8,))
    _, together = evaluate_together(networks, [(inputs, targets)])
    with torch.no_grad():
        mean = (networks[0](inputs).float() + networks[1](inputs).float()) / 2
    assert together.loss == pytest.approx(F.cross_entropy(mean, targets).item(), rel=1e-6)


def test_networks_of_several_processes_count_as_if_all_were_here() -> None:
    """Each process sees its own networks; what it hands to `gather` comes back with what the others handed."""
    networks, batches = make_networks("conv_batch_norm", 3), uneven_batches()
    handed: list[list[Tensor]] = []

    def note(values: list[Tensor]) -> list[Tensor]:
        handed.append(values)
        return values

    evaluate_together(networks[1:], batches, gather=note)
    others = iter(handed)

    def gather(values: list[Tensor]) -> list[Tensor]:
        return [*values, *next(others)]

    assert evaluate_together(networks[:1], batches, gather=gather) == evaluate_together(networks, batches)


def test_apply_computes_the_outputs() -> None:
    (network,) = make_networks("conv_batch_norm", 1)
    batches = uneven_batches()
    found = evaluate(network, batches, apply=lambda model, inputs: model(2 * inputs))
    doubled = [(2 * inputs, targets) for inputs, targets in batches]
    assert found == evaluate(network, doubled)
    with pytest.raises(DataError, match="Sequential returned a list, expected a tensor"):
        evaluate(network, batches, apply=lambda model, inputs: [model(inputs)])  # type: ignore[arg-type, return-value]


def test_no_batches_raise() -> None:
    with pytest.raises(DataError, match="there was no batch to evaluate on: the data is empty"):
        evaluate(nn.Linear(2, 2), [])


def test_batches_without_examples_raise() -> None:
    empty = (torch.empty(0, 2), torch.empty(0, dtype=torch.long))
    with pytest.raises(DataError, match="there was no batch to evaluate on: the data is empty"):
        evaluate(nn.Linear(2, 2), [empty])


def test_accuracy_is_not_for_numbers() -> None:
    with pytest.raises(DataError, match=r"torch\.float32; expected a score for each class"):
        accuracy(torch.zeros(5, 1), torch.zeros(5))


def test_scores_of_probabilities_agree_with_torchmetrics() -> None:
    metrics = pytest.importorskip("torchmetrics.functional.classification")
    outputs, targets = 3 * torch.randn(400, 5), torch.randint(5, (400,))
    batches = [(outputs[:100], targets[:100]), (outputs[100:], targets[100:])]
    details = evaluate(nn.Identity(), batches).details
    probabilities = outputs.softmax(dim=1)
    expected = metrics.multiclass_calibration_error(probabilities, targets, num_classes=5, n_bins=15, norm="l1")
    assert details["ece"] == pytest.approx(expected.item(), rel=1e-5)
    assert details["nll"] == pytest.approx(F.cross_entropy(outputs, targets).item(), rel=1e-5)
    assert details["brier"] == pytest.approx((probabilities - F.one_hot(targets)).square().sum(dim=1).mean().item())


@pytest.mark.parametrize("sureness", [0.4, 1.0, 2.5])
def test_the_temperature_undoes_what_outputs_were_multiplied_by(sureness: float) -> None:
    logits = torch.randn(20_000, 3)
    targets = torch.distributions.Categorical(logits=logits).sample()
    (found,), _ = evaluate_together([nn.Identity()], [(sureness * logits, targets)], temperatures=[sureness, 1.0])
    assert found.details["temperature"] == pytest.approx(sureness, rel=0.05)
    assert found.details["nll_scaled"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert found.details["ece_scaled"] < 0.02
    assert found.score == accuracy(logits, targets).item()


def test_maps_of_classes_are_scored_as_their_pixels() -> None:
    outputs, targets = torch.randn(2, 5, 3, 4), torch.randint(5, (2, 3, 4))
    pixels = outputs.movedim(1, -1).reshape(-1, 5), targets.reshape(-1)
    found, expected = (evaluate(nn.Identity(), [batch]) for batch in ((outputs, targets), pixels))
    assert found.score == expected.score
    assert found.details == pytest.approx(expected.details)
