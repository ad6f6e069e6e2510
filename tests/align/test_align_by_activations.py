"""Pairing units that respond alike: identities, planted permutations, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers import Attention
from papa import models
from papa.align import Symmetries, align_by_activations_, permute_all_, symmetries
from papa.errors import DataError, MemberError, PapaError


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (16, 5)),
    "resnet18": (lambda: models.resnet18(width=8), (4, 3, 32, 32)),
    "resnet20": (lambda: models.resnet20(width=4), (4, 3, 32, 32)),
    "attention": (Attention, (8, 5, 6)),
}


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Symmetries, list[Tensor]]:
    torch.manual_seed(0)
    build, shape = NETWORKS[request.param]
    model = build().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn_like(tensor))
    batches = [torch.randn(shape) for _ in range(3)]
    return model, symmetries(model, batches[0]), batches


def farthest(first: nn.Module, second: nn.Module) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_a_network_matches_itself_as_it_is(case: tuple[nn.Module, Symmetries, list[Tensor]]) -> None:
    model, groups, batches = case
    twin = copy.deepcopy(model)
    align_by_activations_(twin, model, batches, groups=groups)
    assert farthest(twin, model) == 0.0


def test_planted_permutations_are_recovered(case: tuple[nn.Module, Symmetries, list[Tensor]]) -> None:
    model, groups, batches = case
    twin = copy.deepcopy(model)
    permute_all_(twin, groups, {group.name: torch.randperm(group.size) for group in groups})
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.add_(1e-3 * torch.randn_like(tensor))
    assert farthest(twin, model) > 0.01
    alignment = align_by_activations_(twin, model, [(batch, None) for batch in batches], groups=groups)
    assert farthest(twin, model) < 0.01
    assert alignment.before < 0.5 < alignment.after


@torch.no_grad()
def test_matching_never_makes_it_worse_and_keeps_the_function(
    case: tuple[nn.Module, Symmetries, list[Tensor]],
) -> None:
    model, groups, batches = case
    other = copy.deepcopy(model).double()
    for tensor in other.parameters():
        tensor.copy_(torch.randn_like(tensor) * (tensor.std() if tensor.numel() > 1 else 1.0))
    inputs = batches[0].double()
    before = other(inputs)
    alignment = align_by_activations_(
        other, copy.deepcopy(model).double(), [batch.double() for batch in batches], groups=groups
    )
    assert alignment.after >= alignment.before
    assert (other(inputs) - before).abs().max() < 1e-9 * before.abs().max()


@torch.no_grad()
def test_correlations_are_those_of_all_batches_together() -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double() for _ in range(2))
    batches = [torch.randn(9, 4, dtype=torch.float64) for _ in range(3)]
    found = align_by_activations_(model, reference, batches)
    total = 0.0
    for depth in (1, 2):
        theirs, mine = (net[:depth](torch.cat(batches)).T for net in (reference, model))
        total += torch.corrcoef(torch.cat([theirs, mine]))[:6, 6:].diagonal().sum().item()
    assert found.after == pytest.approx(total / 12)


def test_bad_batches_are_refused_and_the_network_is_left_alone() -> None:
    model, reference = mlp(), mlp()
    before = copy.deepcopy(model)
    with pytest.raises(DataError, match="given no batches"):
        align_by_activations_(model, reference, [])
    with pytest.raises(DataError, match=r"batch 1 has inputs of \(3, 5\), expected \(4, 5\)"):
        align_by_activations_(model, reference, [torch.randn(4, 5), torch.randn(3, 5)])
    with pytest.raises(DataError, match="batch 0 has inputs of"):
        align_by_activations_(model, reference, [torch.randn(0, 5)])
    with pytest.raises(MemberError, match=r"activations at '.*' are not finite"):
        align_by_activations_(model, reference, [torch.full((4, 5), float("nan"))])
    assert farthest(model, before) == 0.0


def test_symmetries_written_by_hand_have_no_graph() -> None:
    model = mlp()
    by_hand = Symmetries(symmetries(model, torch.randn(2, 5)).groups)
    with pytest.raises(PapaError, match="have no graph: match by weights"):
        align_by_activations_(model, mlp(), [torch.randn(2, 5)], groups=by_hand)
