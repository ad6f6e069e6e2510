import copy

import pytest
import torch
from torch import nn

from papa import feature_similarity
from papa.errors import DataError
from papa.lab.models import make_model


def make_nets(size: int = 3) -> list[nn.Module]:
    nets = []
    for seed in range(size):
        torch.manual_seed(seed)
        nets.append(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    return nets


def make_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 2, 6, 6, generator=generator) for size in (5, 9)]


def test_similarity_is_the_mean_cosine_over_examples() -> None:
    nets, batches = make_nets(), make_batches()
    found = feature_similarity(nets, batches, layers=["2", "4"])
    for net in nets:
        net.eval()
    for name, depth in (("2", 3), ("4", 5)):
        for first in range(3):
            for second in range(3):
                cosines = []
                for image in torch.cat(batches):
                    one, other = (nets[index][:depth](image[None]).detach().flatten() for index in (first, second))
                    cosines.append(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))
                torch.testing.assert_close(found[name][first, second], torch.stack(cosines).mean())


def test_similarity_is_symmetric_and_1_for_a_network_with_itself() -> None:
    nets = [*make_nets(), make_nets()[0]]
    for matrix in feature_similarity(nets, make_batches()).values():
        torch.testing.assert_close(matrix, matrix.T)
        torch.testing.assert_close(matrix.diagonal(), torch.ones(4, dtype=torch.float64))
        torch.testing.assert_close(matrix[0, 3], torch.tensor(1.0, dtype=torch.float64))
        assert matrix.abs().max() <= 1 + 1e-9


def test_networks_are_unchanged() -> None:
    nets = make_nets()
    nets[0].train()
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    feature_similarity(nets, make_batches())
    assert nets[0].training
    assert not any(module._forward_hooks for net in nets for module in net.modules())
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_the_papers_layers_of_a_resnet() -> None:
    nets = [make_model("resnet18", num_classes=10, width=4) for _ in range(2)]
    layers = [f"stages.{stage}" for stage in range(4)]
    assert list(feature_similarity(nets, [torch.randn(4, 3, 32, 32)], layers=layers)) == layers


def test_invalid_arguments_are_refused() -> None:
    nets = make_nets()
    with pytest.raises(DataError, match="there is no network whose features could be compared"):
        feature_similarity([], make_batches())
    with pytest.raises(DataError, match="there is no layer '4' in network 1"):
        feature_similarity([nets[0], nets[1][:4]], make_batches(), layers=["4"])
    with pytest.raises(DataError, match="layer '4' has 3 outputs per example in network 0 and 2 in network 1"):
        feature_similarity([nets[0], nn.Sequential(*nets[1][:4], nn.Linear(64, 2))], make_batches(), layers=["4"])
    diverged = copy.deepcopy(nets[1])
    diverged[0].weight.data[0] = float("nan")
    with pytest.raises(DataError, match="layer '0' of network 1 has outputs that are not finite"):
        feature_similarity([nets[0], diverged], make_batches(), layers=["0"])
    with pytest.raises(DataError, match="there is no layer '5' in network 0"):
        feature_similarity(nets, make_batches(), layers=["5"])
    with pytest.raises(DataError, match="there was no batch to compare features on"):
        feature_similarity(nets, [])
    for net in nets:
        net.idle = nn.Linear(2, 2)
        net.forward = nn.Sequential(*list(net)[:5]).forward  # type: ignore[method-assign]
    with pytest.raises(DataError, match="layer 'idle' did not run"):
        feature_similarity(nets, make_batches(), layers=["idle"])
