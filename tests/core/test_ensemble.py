from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers import make_networks
from papa.core.population import Population
from papa.core.soups import Ensemble
from papa.errors import SoupError
from papa.evaluation.scores import mean_logits, mean_probabilities


@pytest.mark.parametrize("size", [1, 2, 5])
def test_by_default_it_averages_logits(size: int) -> None:
    networks, inputs = make_networks("linear", size), torch.randn(4, 3)
    expected = sum(network(inputs) for network in networks) / size
    assert torch.allclose(Ensemble(networks)(inputs), expected, atol=1e-6)
    assert torch.allclose(Ensemble(Population(networks), combine=mean_logits)(inputs), expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_it_can_average_probabilities(size: int) -> None:
    networks, inputs = make_networks("linear", size), torch.randn(4, 3)
    expected = sum(network(inputs).softmax(dim=1) for network in networks) / size
    output = Ensemble(networks, combine=mean_probabilities)(inputs)
    assert torch.allclose(output.exp(), expected, atol=1e-6)
    assert torch.allclose(output.exp().sum(dim=1), torch.ones(4), atol=1e-6)


def test_mean_probabilities_takes_classes_from_the_axis_after_the_batch() -> None:
    outputs = torch.randn(3, 2, 5, 4, 4)  # members, batch, classes, height, width
    assert torch.allclose(mean_probabilities(outputs).exp(), outputs.softmax(dim=2).mean(dim=0), atol=1e-6)


def test_mean_probabilities_does_not_overflow() -> None:
    outputs = torch.tensor([[[1000.0, 0.0]], [[0.0, 1000.0]]])
    assert torch.allclose(mean_probabilities(outputs).exp(), torch.tensor([[0.5, 0.5]]))


def test_members_are_shared_not_copied() -> None:
    networks = make_networks("linear", 2)
    ensemble, inputs = Ensemble(networks), torch.randn(4, 3)
    before = ensemble(inputs)
    for network in networks:
        nn.init.zeros_(network.get_parameter("2.weight"))
    assert not torch.equal(ensemble(inputs), before)
    assert len(list(ensemble.parameters())) == 8


def test_modes_reach_the_members() -> None:
    networks = make_networks("conv_batch_norm", 2)
    Ensemble(networks).eval()
    assert not any(module.training for network in networks for module in network.modules())


def test_keyword_arguments_reach_the_members() -> None:
    class Scaled(nn.Module):
        def forward(self, inputs: Tensor, *, scale: float) -> Tensor:
            return inputs * scale

    assert Ensemble([Scaled(), Scaled()])(torch.ones(2), scale=3.0).tolist() == [3.0, 3.0]


def test_an_ensemble_of_nothing_raises() -> None:
    with pytest.raises(SoupError, match="an ensemble needs at least one network, got none"):
        Ensemble([])


def test_outputs_that_are_no_tensors_raise() -> None:
    class Pair(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, inputs

    with pytest.raises(SoupError, match="an ensemble averages tensors, member 1 returned tuple"):
        Ensemble([nn.Identity(), Pair()])(torch.ones(2))
