from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from helpers import assert_same_bits, make_networks, snapshot
from papa.core.population import Population
from papa.errors import DataError
from papa.repair import reset_batch_norm_


def make_network() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
        nn.BatchNorm1d(3),
    )
    network(torch.randn(8, 2, 4, 4))
    return network


def batches(*sizes: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [3 * torch.randn(size, 2, 4, 4, generator=source) + 1 for size in sizes]


def statistics(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in snapshot(network).items() if "running" in name}


def test_it_equals_torchs_update_bn_for_batches_of_one_size() -> None:
    network = make_network()
    torch.manual_seed(0)
    twin = make_network()
    twin.load_state_dict(network.state_dict())
    assert reset_batch_norm_(network, batches(8, 8, 8)) is network
    update_bn([(batch, torch.zeros(8)) for batch in batches(8, 8, 8)], twin)
    for name, tensor in statistics(twin).items():
        assert torch.allclose(tensor, statistics(network)[name], rtol=1e-5, atol=1e-6), name


def test_batches_count_by_their_size() -> None:
    network = nn.Sequential(nn.BatchNorm2d(2))
    uneven = batches(9, 3, 4)
    reset_batch_norm_(network, uneven)
    expected_mean = torch.cat(uneven).mean(dim=(0, 2, 3))
    expected_var = sum(len(batch) * batch.transpose(0, 1).flatten(1).var(dim=1) for batch in uneven) / 16
    assert torch.allclose(network.get_buffer("0.running_mean"), expected_mean, atol=1e-6)
    assert torch.allclose(network.get_buffer("0.running_var"), expected_var, rtol=1e-5)


def test_batches_of_several_inputs_count_by_their_examples() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            found: Tensor = self.norm(inputs["x"])
            return found

    inputs = torch.randn(36, 3)
    network = Named()
    reset_batch_norm_(network, [{"x": part, "mask": part > 0} for part in torch.split(inputs, 32)])
    assert network.norm.running_mean is not None
    assert torch.allclose(network.norm.running_mean, inputs.mean(dim=0), atol=1e-6)
    with pytest.raises(DataError, match="a batch is a int, expected a tensor, or tensors by name"):
        reset_batch_norm_(network, [3])


def test_old_statistics_leave_no_trace() -> None:
    network = make_network()
    reset_batch_norm_(network, batches(8, 4))
    first = statistics(network)
    for tensor in network.buffers():
        tensor.fill_(1000)
    reset_batch_norm_(network, batches(8, 4))
    assert_same_bits(statistics(network), first)


def test_batches_may_come_with_targets_and_from_a_generator() -> None:
    network = make_network()
    reset_batch_norm_(network, batches(8, 4))
    first = statistics(network)
    reset_batch_norm_(network, ((batch, torch.zeros(len(batch))) for batch in batches(8, 4)))
    assert_same_bits(statistics(network), first)
    reset_batch_norm_(network, [[batch] for batch in batches(8, 4)])
    assert_same_bits(statistics(network), first)


def test_everything_else_is_left_as_found() -> None:
    network = nn.Sequential(make_network(), nn.Dropout(0.5))
    network.eval()
    network[0][4].train()
    weights = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    counters = [int(tensor) for name, tensor in network.named_buffers() if "tracked" in name]
    modes = [module.training for module in network.modules()]
    rng_state = torch.get_rng_state()
    before = statistics(network)
    reset_batch_norm_(network, batches(8, 8))
    assert not torch.equal(statistics(network)["0.1.running_mean"], before["0.1.running_mean"])
    assert_same_bits(dict(network.named_parameters()), weights)
    assert [int(tensor) for name, tensor in network.named_buffers() if "tracked" in name] == counters == [1, 1]
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert (network[0][1].momentum, network[0][5].momentum) == (0.3, 0.1)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())


def test_dropout_is_off_while_estimating() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(2)).train()
    reset_batch_norm_(network, batches(16))
    assert torch.allclose(network.get_buffer("1.running_mean"), batches(16)[0].mean(dim=(0, 2, 3)), atol=1e-6)


def failing_batches() -> Iterator[Tensor]:
    yield from batches(8)
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (failing_batches, ZeroDivisionError),
        (list, DataError),
        (lambda: [torch.zeros(8, 2, 4, 4), torch.zeros(8, 99, 4, 4)], RuntimeError),
    ],
    ids=["data that fails", "no data", "data of the wrong shape"],
)
def test_the_old_statistics_are_put_back_after_an_error(data: object, error: type[Exception]) -> None:
    network = make_network()
    network[1].eval()
    before, modes = snapshot(network), [module.training for module in network.modules()]
    with pytest.raises(error, match="no batch to estimate BatchNorm statistics from" if error is DataError else None):
        reset_batch_norm_(network, data())
    assert_same_bits(snapshot(network), before)
    assert [module.training for module in network.modules()] == modes
    assert network[1].momentum == 0.3


def test_a_network_without_batch_norm_is_returned_as_it_is() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    before = snapshot(network)
    assert reset_batch_norm_(network, iter(())) is network
    assert_same_bits(snapshot(network), before)


def test_a_member_stays_bound() -> None:
    population = Population(make_networks("conv_batch_norm", 2))
    pointer = population[0].get_buffer("1.running_mean").data_ptr()
    reset_batch_norm_(population[0], batches(8))
    assert population[0].get_buffer("1.running_mean").data_ptr() == pointer
    expected = (population[0].get_buffer("1.running_mean") + population[1].get_buffer("1.running_mean")) / 2
    population.mix_([[0.5, 0.5], [0.5, 0.5]])
    assert torch.allclose(population[1].get_buffer("1.running_mean"), expected)
