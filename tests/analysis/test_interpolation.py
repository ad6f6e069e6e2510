import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same_bits, small_data, small_net, snapshot
from papa import average_soup, evaluate, interpolate
from papa.analysis.interpolation import Curve, interpolation_curves
from papa.errors import DataError
from papa.evaluation.scores import Batch
from papa.repair import repair_


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


def test_the_ends_are_the_networks_and_both_are_unchanged(nets: list[nn.Module]) -> None:
    before = [snapshot(net) for net in nets]
    curves = interpolation_curves(*nets, make_batches(), make_inputs(), num_points=3)
    for net, state in zip(nets, before, strict=True):
        assert_same_bits(snapshot(net), state)
        assert not net.training
    ends = [evaluate(net, make_batches()) for net in nets]
    for name in ("plain", "aligned"):
        assert curves[name].losses[0] == pytest.approx(ends[0].loss, rel=1e-5)
        assert curves[name].losses[-1] == pytest.approx(ends[1].loss, rel=1e-5)


def test_alignment_and_repair_lower_the_barrier_between_independent_networks(nets: list[nn.Module]) -> None:
    curves = interpolation_curves(*nets, make_batches(), make_inputs())
    assert list(curves) == ["plain", "aligned", "repaired", "aligned and repaired"]
    barriers = {name: curve.barrier for name, curve in curves.items()}
    assert barriers["plain"] > 0.05
    without = interpolation_curves(*nets, make_batches(), make_inputs(), align=False)
    assert without == {name: curves[name] for name in ("plain", "repaired")}
    assert barriers["aligned"] < barriers["plain"]
    assert barriers["aligned and repaired"] < barriers["repaired"] < barriers["plain"]


def test_a_repaired_point_is_a_repaired_average(nets: list[nn.Module]) -> None:
    curves = interpolation_curves(*nets, make_batches(), make_inputs(), num_points=3)
    expected = average_soup(nets)
    repair_(expected, nets, make_inputs())
    assert curves["repaired"].losses[1] == pytest.approx(evaluate(expected, make_batches()).loss, rel=1e-6)


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
    there = interpolate(*nets, make_batches(), num_points=5)
    back = interpolate(*reversed(nets), make_batches(), num_points=5)
    for one, other in itertools.zip_longest(there.losses, reversed(back.losses)):
        assert one == pytest.approx(other, rel=1e-5)


def test_invalid_arguments_are_refused(nets: list[nn.Module]) -> None:
    with pytest.raises(DataError, match="num_points is 1, expected at least 2"):
        interpolate(*nets, make_batches(), num_points=1)
    with pytest.raises(DataError, match="the data is empty"):
        interpolate(*nets, [])


def test_an_iterator_of_batches_is_kept() -> None:
    first, second = (nn.Linear(4, 2) for _ in range(2))
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
    assert interpolate(first, second, iter(batches)) == interpolate(first, second, batches)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    soups = [average_soup(nets) for _ in range(2)]
    inputs = [batch for batch, _ in batches]
    repair_(soups[0], nets, inputs)
    repair_(soups[1], nets, (batch for batch in inputs))
    assert torch.equal(soups[0][0].weight, soups[1][0].weight)
