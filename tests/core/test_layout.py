from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers import NETWORKS, assert_close, averaged_tensors, make_networks
from papa.core import layout, mixing
from papa.core.population import Population
from papa.errors import MemberError


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_tensor_starts_on_a_cache_line_and_none_overlap(kind: str) -> None:
    population = Population(make_networks(kind, 3))
    for dtype, rows in population.matrices.items():
        assert rows.stride(0) * rows.element_size() // layout.ALIGNMENT_BYTES % 2 == 1
        spans = []
        for index in range(3):
            for tensor in averaged_tensors(population)[index].values():
                if tensor.dtype == dtype and tensor.numel():
                    assert tensor.data_ptr() % layout.ALIGNMENT_BYTES == 0
                    spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert rows.data_ptr() <= spans[0][0]
        assert spans[-1][1] <= rows.data_ptr() + rows.numel() * rows.element_size()


def test_an_alias_has_a_storage_of_exactly_its_own_size() -> None:
    rows = torch.arange(2 * 64.0).reshape(2, 64)
    slot = layout.Slot("weight", True, torch.float32, torch.Size([2, 3]), (3, 1), offset=16)
    tensor = layout.alias(rows[1], slot)
    assert tensor.untyped_storage().nbytes() == 6 * 4
    assert tensor.flatten().tolist() == rows[1, 16:22].tolist()
    tensor.zero_()
    assert rows[1, 16:22].tolist() == [0.0] * 6
    assert rows[1, 22] == 64 + 22


def test_parameters_come_before_buffers() -> None:
    plan = layout.plan(make_networks("conv_batch_norm", 2), {})
    kinds = [slot.is_parameter for slot in plan.slots]
    assert kinds == sorted(kinds, reverse=True)
    first_buffer = min(slot.offset for slot in plan.slots if not slot.is_parameter)
    assert plan.num_parameter_columns == {torch.float32: first_buffer}


def test_the_main_dtype_is_the_one_most_numbers_have() -> None:
    network = nn.ModuleDict({"small": nn.Linear(2, 2), "large": nn.Linear(50, 50).double()})
    assert layout.plan([network], {}).main_dtype == torch.float64


def test_named_tensors_come_in_the_order_asked() -> None:
    network = nn.Linear(2, 3)
    assert list(layout.named_tensors(network, ["bias", "weight"])) == ["bias", "weight"]
    assert layout.named_tensors(network, ["bias"])["bias"] is network.bias


class Tagged(Tensor):
    """A subclass."""


def linear_with(buffer: Tensor) -> nn.Module:
    network = nn.Linear(2, 2)
    network.register_buffer("extra", buffer)
    return network


@torch.inference_mode()
def made_in_inference_mode() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(2), "'weight' uninitialised: run one forward pass through it first"),
        (
            lambda: linear_with(torch.eye(2).to_sparse()),
            "'extra' as torch.sparse_coo, expected a plain dense tensor: leave it out with `average`",
        ),
        (lambda: linear_with(torch.ones(2).as_subclass(Tagged)), "'extra' as Tagged, expected a plain dense tensor"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' on the meta device: give it values first"),
        (made_in_inference_mode, "'weight' made under inference_mode: build members outside"),
    ],
)
def test_tensors_without_a_row_raise(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(MemberError, match=f"member 0 has {message}"):
        layout.plan([make()], {})


def test_networks_without_numbers_raise() -> None:
    with pytest.raises(MemberError, match="members have no floating-point tensor: there is nothing to average"):
        layout.plan([nn.ReLU()], {})
    with pytest.raises(MemberError, match="there is nothing to average"):
        layout.plan([nn.Linear(2, 2)], {"*": False})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_members_on_two_devices_raise() -> None:
    with pytest.raises(MemberError, match="member 1 has 'weight' on cuda:0, others are on cpu: move all averaged"):
        layout.plan([nn.Linear(2, 2), nn.Linear(2, 2, device="cuda")], {})


def test_tensors_that_are_not_averaged_may_be_on_another_device() -> None:
    nets = [nn.ModuleDict({"base": nn.Linear(2, 2, device="meta"), "head": nn.Linear(2, 2)}) for _ in range(2)]
    population = Population(nets, average={"base.*": False})
    population.mix_([[0.5, 0.5], [0.5, 0.5]])
    assert torch.equal(nets[0]["head"].weight, nets[1]["head"].weight)
    assert nets[0]["base"].weight.is_meta


def test_a_replaced_layer_is_noticed() -> None:
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2)]
    population = Population(nets)
    nets[1][1] = nn.Linear(4, 2)
    with pytest.raises(MemberError, match=r"member 1 has another module as .* rebuild population and optimizers"):
        population.mix_(mixing.merge_all(2))


def test_a_transposed_tensor_is_copied_back_into_its_row() -> None:
    nets = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    expected = sum(net.weight.detach().clone().t() for net in nets) / 2
    population = Population(nets)
    for net in nets:
        net.weight.data = net.weight.data.t()
    population.mix_(mixing.merge_all(2))
    for net in nets:
        assert_close(net.weight.detach(), expected)


def test_tensors_that_share_memory_without_being_tied_raise() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight.data = net[0].weight.data
    with pytest.raises(MemberError, match=r"member 0 has '1\.weight' in the memory of '0\.weight'"):
        Population([net])


def test_a_buffer_that_was_replaced_is_read_but_never_captured() -> None:
    nets = [nn.BatchNorm1d(3) for _ in range(2)]
    population = Population(nets)
    constant = torch.tensor([1.0, 2.0, 3.0])
    for net in nets:
        net.running_mean = constant
    nets[0].weight.data.fill_(5.0)
    population.mix_(mixing.merge_all(2))
    nets[0].running_mean.add_(1.0)
    assert constant.tolist() == [1.0, 2.0, 3.0]
    assert nets[1].running_mean.tolist() == [1.0, 2.0, 3.0]
    population.mix_(mixing.merge_all(2))
    assert nets[1].running_mean.tolist() == [1.5, 2.5, 3.5]


def test_the_matrix_follows_when_all_members_change_their_memory_order() -> None:
    nets = [nn.Conv2d(3, 4, 3) for _ in range(2)]
    population = Population(nets)
    mean = sum(net.weight.detach().clone() for net in nets) / 2
    for net in nets:
        net.to(memory_format=torch.channels_last)
    population.mix_(mixing.merge_all(2))
    for net in nets:
        assert net.weight.is_contiguous(memory_format=torch.channels_last)
        assert_close(net.weight.detach(), mean)


def test_a_layer_added_after_binding_is_noticed() -> None:
    nets = [nn.Sequential(nn.Linear(3, 3)) for _ in range(2)]
    population = Population(nets)
    nets[1].append(nn.Linear(3, 3))
    with pytest.raises(MemberError, match="member 1 has gained parameters or layers since it was bound"):
        population.mix_(mixing.merge_all(2))


def test_buffers_that_are_not_averaged_may_differ_in_shape() -> None:
    nets = [nn.Linear(3, 3) for _ in range(2)]
    for size, net in enumerate(nets, start=1):
        net.register_buffer("seen", torch.zeros(size, dtype=torch.long))
    Population(nets).mix_(mixing.merge_all(2))
    assert [len(net.seen) for net in nets] == [1, 2]


def test_an_empty_buffer_stays_out_and_may_be_resized() -> None:
    networks = [nn.Linear(2, 2) for _ in range(2)]
    for network in networks:
        network.register_buffer("seen", torch.tensor([]))
    population = Population(networks)
    assert "seen" in population.not_averaged
    networks[0].seen.resize_(3)
    population.mix_([[0.5, 0.5], [0.5, 0.5]])
