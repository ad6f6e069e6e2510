"""Permuting and matching: identities, inverses, planted permutations, and what is refused."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from helpers import Attention
from papa import Population, models
from papa.align import Symmetries, align_, inverse, permute_, permute_all_, symmetries
from papa.errors import MemberError, PapaError


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(32, 2, 1),
    )


NETWORKS = {
    "mlp": (lambda: mlp(5, 12, 9, 3), (2, 5)),
    "resnet18": (lambda: models.resnet18(width=8), (1, 3, 32, 32)),
    "resnet20": (lambda: models.resnet20(width=4), (1, 3, 32, 32)),
    "vgg": (lambda: models.VGG(11, width=8), (1, 3, 32, 32)),
    "attention": (Attention, (2, 5, 6)),
    "grouped": (grouped, (1, 3, 10, 10)),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Symmetries]:
    torch.manual_seed(0)
    build, shape = NETWORKS[request.param]
    model = build()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn_like(tensor))
    return model.eval(), symmetries(model, torch.randn(shape))


def same(first: nn.Module, second: nn.Module, tolerance: float = 0.0) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(bool(((a - b).abs() <= tolerance).all()) for a, b in pairs)


def random_permutations(groups: Symmetries) -> dict[str, Tensor]:
    return {group.name: torch.randperm(group.size) for group in groups}


def test_a_permutation_then_its_inverse_is_the_identity(network: tuple[nn.Module, Symmetries]) -> None:
    model, groups = network
    twin = copy.deepcopy(model)
    orders = random_permutations(groups)
    permute_all_(twin, groups, orders)
    assert not same(twin, model)
    permute_all_(twin, groups, {name: inverse(order) for name, order in reversed(orders.items())})
    assert same(twin, model)


def test_a_network_matches_itself_as_it_is(network: tuple[nn.Module, Symmetries]) -> None:
    model, groups = network
    twin = copy.deepcopy(model)
    alignment = align_(twin, model, groups=groups)
    assert same(twin, model)
    assert alignment.before == alignment.after == pytest.approx(1.0)


def test_planted_permutations_are_recovered(network: tuple[nn.Module, Symmetries]) -> None:
    model, groups = network
    twin = copy.deepcopy(model)
    permute_all_(twin, groups, random_permutations(groups))
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.add_(1e-3 * torch.randn_like(tensor))
    assert not same(twin, model, tolerance=0.01)
    align_(twin, model, groups=groups)
    assert same(twin, model, tolerance=0.01)


@torch.no_grad()
def test_matching_never_makes_it_worse_and_keeps_the_function(network: tuple[nn.Module, Symmetries]) -> None:
    model, groups = network
    model = copy.deepcopy(model).double()
    other = copy.deepcopy(model)
    for tensor in other.parameters():
        tensor.copy_(torch.randn_like(tensor) * tensor.std())
    shape = next(shape for build, shape in NETWORKS.values() if type(build()) is type(model) and _fits(model, shape))
    inputs = torch.randn(shape, dtype=torch.float64)
    before = other(inputs)
    alignment = align_(other, model, groups=groups)
    assert alignment.after >= alignment.before
    assert (other(inputs) - before).abs().max() < 1e-9 * before.abs().max()


def _fits(model: nn.Module, shape: tuple[int, ...]) -> bool:
    try:
        model(torch.randn(shape, dtype=torch.float64))
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def test_one_hidden_layer_is_matched_as_well_as_can_be() -> None:
    torch.manual_seed(1)
    model, reference = mlp(4, 5, 2), mlp(4, 5, 2)
    (group,) = symmetries(model, torch.randn(2, 4))

    def likeness(order: tuple[int, ...]) -> float:
        twin = copy.deepcopy(model)
        permute_(twin, group, order)
        pairs = zip(twin.parameters(), reference.parameters(), strict=True)
        alike = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in pairs]
        return sum(alike[:3]) / 3  # the last bias has no hidden unit

    best = max(likeness(order) for order in itertools.permutations(range(5)))
    assert align_(model, reference, torch.randn(2, 4)).after == pytest.approx(best, abs=1e-6)


def test_members_of_a_population_stay_in_its_matrix() -> None:
    population = Population([mlp(4, 8, 2) for _ in range(2)])
    pointers = [tensor.data_ptr() for tensor in population[1].parameters()]
    align_(population[1], population[0], torch.randn(2, 4))
    assert [tensor.data_ptr() for tensor in population[1].parameters()] == pointers


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3], [0.0, 1.0, 2.0]])
def test_what_is_no_permutation_is_refused(order: list[int]) -> None:
    model = mlp(4, 3, 2)
    before = copy.deepcopy(model)
    (group,) = symmetries(model, torch.randn(2, 4))
    with pytest.raises(PapaError, match=r"group '0.weight' was given .*, expected each of 0 to 2 exactly once"):
        permute_(model, group, order)
    assert same(model, before)


def test_symmetries_of_another_network_are_refused() -> None:
    (group,) = symmetries(mlp(4, 8, 2), torch.randn(2, 4))
    with pytest.raises(MemberError, match=r"'0.weight' of shape \(6, 4\), expected more than 7 along axis 0"):
        permute_(mlp(4, 6, 2), group, torch.randperm(8))
    with pytest.raises(MemberError, match=r"has no '0.weight'"):
        permute_(nn.Linear(4, 8), group, torch.randperm(8))


def test_networks_that_differ_are_refused() -> None:
    model = mlp(4, 8, 2)
    with pytest.raises(MemberError, match=r"the model has '0.weight' of shape \(8, 4\), the reference \(6, 4\)"):
        align_(model, mlp(4, 6, 2), torch.randn(2, 4))
    with pytest.raises(MemberError, match=r"the reference has '4.bias', the model has not"):
        align_(model, mlp(4, 8, 3, 2), torch.randn(2, 4))
    with pytest.raises(PapaError, match="either `example_input` or `groups`"):
        align_(model, mlp(4, 8, 2))


def test_a_network_with_nan_is_refused_and_left_alone() -> None:
    model, reference = mlp(4, 8, 2), mlp(4, 8, 2)
    before = copy.deepcopy(model)
    with torch.no_grad():
        reference[0].weight[0, 0] = float("nan")
    with pytest.raises(MemberError, match=r"the reference has '0.weight' with values that are not finite"):
        align_(model, reference, torch.randn(2, 4))
    assert same(model, before)
