"""Aligning many networks: to the first, and jointly."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from align_networks import NETWORKS, mlp, noisy_, random_permutations, same
from papa import Population
from papa.align import Alignment, align_, align_all_, permute_all_, symmetries
from papa.align.matching import CRITERIA, Matcher
from papa.core.group import LocalGroup
from papa.errors import MemberError, PapaError

SIZE = 4


def members(name: str = "mlp", seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [noisy_(NETWORKS[name][0](), 0.05).eval() for _ in range(SIZE)]


def over_pairs(models: list[nn.Module], batches: list[torch.Tensor], by: str) -> float:
    """The sum over pairs of the similarity of two networks, without permuting them."""
    matcher = Matcher(batches, by=by)
    pairs = itertools.combinations(models, 2)
    return sum(matcher.match_to_first(list(pair), ["one", "other"])[0].before for pair in pairs)


@pytest.mark.parametrize("by", CRITERIA)
def test_aligning_all_to_the_first_is_aligning_pairs(by: str) -> None:
    nets = members()
    twins, batches = copy.deepcopy(nets), [torch.randn(16, 5) for _ in range(2)]
    found = align_all_(nets, batches, by=by)
    expected = [align_(twin, twins[0], batches, by=by) for twin in twins[1:]]
    assert all(same(net, twin) for net, twin in zip(nets, twins, strict=True))
    assert [one.after for one in found[1:]] == [one.after for one in expected]


@pytest.mark.parametrize("by", ["activations", "weights"])
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_joint_alignment_is_at_least_as_good_as_to_the_first_and_better_than_none(name: str, by: str) -> None:
    nets = members(name)
    batches = [torch.randn(NETWORKS[name][1]) for _ in range(2)]
    first, joint = copy.deepcopy(nets), copy.deepcopy(nets)
    align_all_(first, batches, by=by)
    found = align_all_(joint, batches, to="joint", by=by)
    values = [over_pairs(some, batches, by) for some in (nets, first, joint)]
    assert values[2] >= values[1] - 1e-6
    assert values[2] > values[0]
    assert sum(one.after for one in found) / 2 * (SIZE - 1) == pytest.approx(values[2], abs=1e-5)
    assert sum(one.before for one in found) / 2 * (SIZE - 1) == pytest.approx(values[0], abs=1e-5)


@pytest.mark.parametrize("by", CRITERIA)
def test_joint_alignment_undoes_random_permutations_and_keeps_functions(by: str) -> None:
    (original, *_), inputs = members(), torch.randn(16, 5)
    found = symmetries(original, inputs)
    nets = [copy.deepcopy(original) for _ in range(SIZE)]
    for net in nets:
        permute_all_(net, found, random_permutations(found))
        noisy_(net, 1e-4)
    before = [net(inputs) for net in nets]
    align_all_(nets, [inputs], to="joint", by=by, symmetries=found)
    assert all(same(net, nets[0], tolerance=0.01) for net in nets)  # all pairs at once: alignments compose
    assert all(torch.allclose(net(inputs), old, atol=1e-5) for net, old in zip(nets, before, strict=True))


def test_joint_alignment_of_aligned_networks_does_not_decrease() -> None:
    nets, batches = members(), [torch.randn(16, 5)]
    align_all_(nets, batches, to="joint")
    twins = copy.deepcopy(nets)
    again = align_all_(nets, batches, to="joint")
    assert sum(one.after for one in again) >= sum(one.before for one in again)
    assert over_pairs(nets, batches, "activations") >= over_pairs(twins, batches, "activations") - 1e-6


def test_no_network_is_changed_if_one_is_not_finite() -> None:
    nets = members()
    with torch.no_grad():
        nets[-1][0].weight[0, 0] = float("nan")
    before = copy.deepcopy(nets)
    for to, by in itertools.product(("first", "joint"), CRITERIA):
        with pytest.raises(MemberError, match=r"member 3 has '0.weight' with values that are not finite"):
            align_all_(nets, [torch.randn(16, 5)], to=to, by=by)
    assert all(same(net, old) for net, old in zip(nets[:-1], before[:-1], strict=True))


def test_one_network_is_aligned_with_itself() -> None:
    for to in ("first", "joint"):
        (found,) = align_all_([mlp()], [torch.randn(16, 5)], to=to)
        assert isinstance(found, Alignment)
        assert found.after == 1.0


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(PapaError, match=r"networks cannot be aligned to 'joined': did you mean joint\?"):
        align_all_(members(), torch.randn(16, 5), to="joined")
    nets = members()
    with pytest.raises(PapaError, match="given 1 optimizers for 4 networks"):
        align_all_(nets, torch.randn(16, 5), optimizers=[torch.optim.SGD(nets[0].parameters(), lr=0.1)])

    class OneMoreMember(LocalGroup):
        def size(self, num_here: int) -> int:
            return num_here + 1

    with pytest.raises(PapaError, match=r"has 3 members, of which 2 are on this process: .*to=.first"):
        align_all_(Population([mlp(), mlp()], OneMoreMember()), torch.randn(16, 5), to="joint")
