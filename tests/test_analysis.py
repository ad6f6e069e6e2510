"""Similarity of features, and the line between two networks."""

import copy

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same_bits, small_data, small_net, snapshot
from papa import align_, average_soup, evaluate, feature_similarity, interpolate, repair_
from papa.analysis import Curve
from papa.errors import DataError
from papa.evaluation.scores import Batch
from papa.lab.models import make_model


def make_nets(size: int = 3) -> list[nn.Module]:
    nets = []
    for seed in range(size):
        torch.manual_seed(seed)
        nets.append(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    return nets


def make_images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 2, 6, 6, generator=generator) for size in (5, 9)]


def test_similarity_is_the_mean_cosine_over_examples() -> None:
    nets, batches = make_nets(), make_images()
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
    for matrix in feature_similarity(nets, make_images()).values():
        torch.testing.assert_close(matrix, matrix.T)
        torch.testing.assert_close(matrix.diagonal(), torch.ones(4, dtype=torch.float64))
        torch.testing.assert_close(matrix[0, 3], torch.tensor(1.0, dtype=torch.float64))
        assert matrix.abs().max() <= 1 + 1e-9


def test_compared_networks_are_unchanged() -> None:
    nets = make_nets()
    nets[0].train()
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    feature_similarity(nets, make_images())
    assert nets[0].training
    assert not any(module._forward_hooks for net in nets for module in net.modules())
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_the_papers_layers_of_a_resnet() -> None:
    nets = [make_model("resnet18", num_classes=10, width=4) for _ in range(2)]
    layers = [f"stages.{stage}" for stage in range(4)]
    assert list(feature_similarity(nets, [torch.randn(4, 3, 32, 32)], layers=layers)) == layers


def test_networks_that_cannot_be_compared_are_named() -> None:
    nets = make_nets()
    with pytest.raises(DataError, match="there is no network whose features could be compared"):
        feature_similarity([], make_images())
    with pytest.raises(DataError, match="there is no layer '4' in network 1"):
        feature_similarity([nets[0], nets[1][:4]], make_images(), layers=["4"])
    with pytest.raises(DataError, match="layer '4' has 3 outputs per example in network 0 and 2 in network 1"):
        feature_similarity([nets[0], nn.Sequential(*nets[1][:4], nn.Linear(64, 2))], make_images(), layers=["4"])
    diverged = copy.deepcopy(nets[1])
    diverged[0].weight.data[0] = float("nan")
    with pytest.raises(DataError, match="layer '0' of network 1 has outputs that are not finite"):
        feature_similarity([nets[0], diverged], make_images(), layers=["0"])
    with pytest.raises(DataError, match="there is no layer '5' in network 0"):
        feature_similarity(nets, make_images(), layers=["5"])
    with pytest.raises(DataError, match="there was no batch to compare features on"):
        feature_similarity(nets, [])
    for net in nets:
        net.idle = nn.Linear(2, 2)
        net.forward = nn.Sequential(*list(net)[:5]).forward  # type: ignore[method-assign]
    with pytest.raises(DataError, match="layer 'idle' did not run"):
        feature_similarity(nets, make_images(), layers=["idle"])


def make_batches() -> list[Batch]:
    return [small_data(600).train.batch(torch.arange(200))]


def make_inputs() -> list[Tensor]:
    return list(small_data(600).validation.batch(torch.arange(192))[0].split(64))


def trained(seed: int) -> nn.Module:
    """A network that was trained on the data independently."""
    torch.manual_seed(seed)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        for inputs, targets in make_batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def nets() -> list[nn.Module]:
    return [trained(seed) for seed in range(2)]


def test_every_point_is_the_weighted_average_of_both(nets: list[nn.Module]) -> None:
    curve = interpolate(*nets, make_batches(), num_points=5)
    assert curve.coefficients == (0.0, 0.25, 0.5, 0.75, 1.0)
    for t, score, loss in zip(curve.coefficients, curve.scores, curve.losses, strict=True):
        mixed = copy.deepcopy(nets[0])
        for name, tensor in (*mixed.named_parameters(), *mixed.named_buffers()):
            if tensor.is_floating_point():
                one, other = snapshot(nets[0])[name], snapshot(nets[1])[name]
                tensor.data.copy_((1 - t) * one + t * other)
        expected = evaluate(mixed, make_batches())
        assert score == pytest.approx(expected.score, abs=0.51)  # one example in 200 may change sides
        assert loss == pytest.approx(expected.loss, rel=1e-5)


def test_alignment_and_repair_lower_the_barrier_between_independent_networks(nets: list[nn.Module]) -> None:
    first, second = nets
    before = [snapshot(net) for net in nets]
    inputs, matched = make_inputs(), copy.deepcopy(second)
    align_(matched, first, inputs, by="activations")

    def repair(network: nn.Module, row: Tensor) -> None:
        repair_(network, [first, matched], inputs, row)

    curves = [
        interpolate(first, second, make_batches()),
        interpolate(first, matched, make_batches()),
        interpolate(first, matched, make_batches(), after=repair),
    ]
    assert curves[0].barrier > 0.05
    assert curves[2].barrier < curves[1].barrier < curves[0].barrier
    ends = [evaluate(net, make_batches()).loss for net in nets]
    for curve in curves[:2]:
        assert [curve.losses[0], curve.losses[-1]] == pytest.approx(ends, rel=1e-5)
    expected = average_soup([first, matched])
    repair_(expected, [first, matched], inputs)
    assert curves[2].losses[5] == pytest.approx(evaluate(expected, make_batches()).loss, rel=1e-6)
    for net, state in zip(nets, before, strict=True):
        assert_same_bits(snapshot(net), state)
        assert not net.training


def test_after_is_called_with_the_weights_of_each_point(nets: list[nn.Module]) -> None:
    seen: list[list[float]] = []
    interpolate(*nets, make_batches(), num_points=3, after=lambda network, row: seen.append(row.tolist()))
    assert seen == [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]


def test_the_barrier_is_the_largest_rise_above_the_line_between_both_ends() -> None:
    curve = Curve((0.0, 0.5, 1.0), (90.0, 40.0, 80.0), (0.2, 1.3, 0.4))
    assert curve.barrier == pytest.approx(1.0)
    assert Curve((0.0, 0.5, 1.0), (0.0,) * 3, (0.2, 0.1, 0.4)).barrier == 0.0
    assert curve.to_json() == {
        "coefficients": [0.0, 0.5, 1.0],
        "score": [90.0, 40.0, 80.0],
        "loss": [0.2, 1.3, 0.4],
        "barrier": curve.barrier,
    }


def test_the_reversed_line_has_the_same_losses(nets: list[nn.Module]) -> None:
    there, back = (interpolate(*ends, make_batches(), num_points=5) for ends in (nets, nets[::-1]))
    assert there.losses == pytest.approx(back.losses[::-1], rel=1e-5)


def test_lines_that_cannot_be_scored_are_named(nets: list[nn.Module]) -> None:
    with pytest.raises(DataError, match="num_points is 1, expected at least 2"):
        interpolate(*nets, make_batches(), num_points=1)
    with pytest.raises(DataError, match="the data is empty"):
        interpolate(*nets, [])


def test_an_iterator_of_batches_is_kept(nets: list[nn.Module]) -> None:
    assert interpolate(*nets, iter(make_batches()), num_points=3) == interpolate(*nets, make_batches(), num_points=3)
    inputs, soups = make_inputs(), [average_soup(nets) for _ in range(2)]
    repair_(soups[0], nets, inputs)
    repair_(soups[1], nets, iter(inputs))
    assert_same_bits(snapshot(soups[0]), snapshot(soups[1]))
