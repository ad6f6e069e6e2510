"""Permuting: inverses, optimizer state, and refused arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from align_networks import NETWORKS, mlp, noisy_, random_permutations, same
from papa.align import inverse, permute_all_, symmetries
from papa.errors import MemberError, PapaError


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permutation_then_its_inverse_is_the_identity(name: str) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model = noisy_(build(), 0.05)
    found = symmetries(model, torch.randn(shape))
    twin, orders = copy.deepcopy(model), random_permutations(found)
    permute_all_(twin, found, orders)
    assert not same(twin, model)
    permute_all_(twin, found, {name: inverse(order) for name, order in reversed(orders.items())})
    assert same(twin, model)


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True),
}


def train_(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, *, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("moves_state", [True, False])
def test_training_continues_as_before_if_the_optimizer_state_is_permuted_too(kind: str, moves_state: bool) -> None:
    torch.manual_seed(0)
    model, inputs = mlp().double(), torch.randn(16, 5, dtype=torch.float64)
    optimizer = OPTIMIZERS[kind](model)
    train_(model, optimizer, inputs, num_steps=3)
    twin = copy.deepcopy(model)
    twin_optimizer = OPTIMIZERS[kind](twin)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = symmetries(model, inputs)
    orders = random_permutations(found)
    permute_all_(twin, found, orders, optimizer=twin_optimizer if moves_state else None)
    train_(model, optimizer, inputs, num_steps=3)
    train_(twin, twin_optimizer, inputs, num_steps=3)
    permute_all_(model, found, orders)
    assert same(twin, model, tolerance=1e-12) == moves_state


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3], [0.0, 1.0, 2.0]])
def test_invalid_permutations_are_refused(order: list[int]) -> None:
    model = mlp(4, 3, 2)
    before = copy.deepcopy(model)
    with pytest.raises(PapaError, match=r"group '0.weight' was given .*, expected each of 0 to 2 exactly once"):
        permute_all_(model, symmetries(model, torch.randn(2, 4)), {"0.weight": order})
    assert same(model, before)


def test_an_unknown_group_is_refused_and_the_network_unchanged() -> None:
    model = mlp(4, 3, 3, 2)
    before, found = copy.deepcopy(model), symmetries(model, torch.randn(2, 4))
    with pytest.raises(PapaError, match=r"no group '0.wait': did you mean 0.weight\?"):
        permute_all_(model, found, {"2.weight": [2, 1, 0], "0.wait": [2, 1, 0]})
    assert same(model, before)


def test_symmetries_of_another_network_are_refused() -> None:
    found, orders = symmetries(mlp(4, 8, 2), torch.randn(2, 4)), {"0.weight": torch.randperm(8)}
    with pytest.raises(MemberError, match=r"'0.weight' of shape \(6, 4\), expected more than 7 along dim 0"):
        permute_all_(mlp(4, 6, 2), found, orders)
    with pytest.raises(MemberError, match=r"has no '0.weight'"):
        permute_all_(nn.Linear(4, 8), found, orders)
