"""Many networks: to the first, before merges, and in soups; cadence, optimizers, several processes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import group_jobs
from align_networks import mlp, random_permutations, same
from papa import AlignMerges, Averager, MergeAll, Population, Push, align_, aligned_soups, average_soup, greedy_soup
from papa.align import align_all_, permute_all_, symmetries
from papa.align.matching import CRITERIA
from papa.core.group import LocalGroup
from papa.distributed.start import start_workers
from papa.errors import MemberError, MixingError, PapaError, SoupError
from papa.repair import RepairMerges, repair_

SIZE = 3


def members(seed: int = 0) -> list[nn.Sequential]:
    torch.manual_seed(seed)
    return [mlp() for _ in range(SIZE)]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, 5, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("by", CRITERIA)
def test_aligning_all_to_the_first_is_aligning_pairs(by: str) -> None:
    nets = members()
    twins = copy.deepcopy(nets)
    found = align_all_(nets, batches(), by=by)
    expected = [align_(twin, twins[0], batches(), by=by) for twin in twins[1:]]
    assert all(same(net, twin) for net, twin in zip(nets, twins, strict=True))
    assert [one.after for one in found] == [1.0, *(one.after for one in expected)]


def test_no_network_is_changed_if_one_is_not_finite() -> None:
    nets = members()
    with torch.no_grad():
        nets[-1][0].weight[0, 0] = float("nan")
    before = copy.deepcopy(nets)
    with pytest.raises(MemberError, match=r"member 2 has '0.weight' with values that are not finite"):
        align_all_(nets, batches())
    assert all(same(net, old) for net, old in zip(nets[:-1], before[:-1], strict=True))


@pytest.mark.parametrize("by", ["activations", "weights"])
def test_members_are_aligned_to_the_first_and_then_merged(by: str) -> None:
    nets = members()
    expected = copy.deepcopy(nets)
    for net in expected[1:]:
        align_(net, expected[0], batches(), by=by)
    Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=AlignMerges(batches(), by=by)).step()
    assert same(nets[0], average_soup(expected), tolerance=1e-6)


def test_merging_permuted_copies_returns_the_original() -> None:
    model, *_ = members()
    found = symmetries(model, batches()[0])
    nets = [copy.deepcopy(model) for _ in range(SIZE)]
    for net in nets[1:]:
        permute_all_(net, found, random_permutations(found))
    Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=AlignMerges(batches())).step()
    assert all(same(net, model, tolerance=1e-6) for net in nets)


def test_alignment_can_be_less_frequent_than_averaging() -> None:
    align = AlignMerges(batches(), every_steps=7)
    averager = Averager(Population(members()), Push(alpha=0.9, every_steps=2), merge_hooks=align)
    aligned_at = []
    for step in range(1, 31):
        align.alignments = []
        averager.step()
        if align.alignments:
            aligned_at.append(step)
    assert aligned_at == [8, 14, 22, 28]  # the first push at or after every seventh step


def test_momentum_is_permuted_with_its_parameters() -> None:
    nets, inputs = [net.double() for net in members()], batches()[0].double()

    def optimizers_of(some: list[nn.Sequential]) -> list[torch.optim.SGD]:
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in some]

    def train_(some: list[nn.Sequential], optimizers: list[torch.optim.SGD]) -> None:
        for net, optimizer in zip(some, optimizers, strict=True):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()

    optimizers = optimizers_of(nets)
    for _ in range(2):
        train_(nets, optimizers)
    twins = copy.deepcopy(nets)
    twin_optimizers = optimizers_of(twins)
    for twin, own in zip(twin_optimizers, optimizers, strict=True):
        twin.load_state_dict(copy.deepcopy(own.state_dict()))
    population = Population(nets)
    align = AlignMerges([inputs], optimizers=optimizers)
    align.align_(population)
    assert not same(nets[1], twins[1], tolerance=1e-3)
    for _ in range(3):
        train_(nets, optimizers)
        train_(twins, twin_optimizers)
    for net, twin in zip(nets, twins, strict=True):
        assert torch.allclose(net(inputs), twin(inputs), rtol=0, atol=1e-12)


def test_alignment_and_repair_combine_in_one_merge() -> None:
    nets = members()
    expected = copy.deepcopy(nets)
    for net in expected[1:]:
        align_(net, expected[0], batches())
    child = average_soup(expected)
    repair_(child, expected, batches())
    given = batches()
    hooks = [AlignMerges(given), RepairMerges(lambda member: given)]
    Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=hooks).step()
    assert all(same(net, child, tolerance=1e-5) for net in nets)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(MixingError, match="every_steps is 0"):
        AlignMerges(batches(), every_steps=0)
    nets = members()
    align = AlignMerges(batches(), optimizers=[torch.optim.SGD(nets[0].parameters(), lr=0.1)])
    with pytest.raises(PapaError, match="1 optimizers for 3 networks"):
        align.align_(Population(nets))
    with pytest.raises(PapaError, match="1 optimizers for 3 networks"):
        align_all_(nets, batches(), optimizers=[torch.optim.SGD(nets[0].parameters(), lr=0.1)])


def test_two_processes_align_as_one_does() -> None:
    expected = group_jobs.align(LocalGroup())
    assert group_jobs.identical(start_workers(group_jobs.align, 2, group_jobs.SIZE), expected)


def first_weight(net: nn.Sequential) -> float:
    return float(net[0].weight.detach().square().mean())


def reference_average(nets: list[nn.Sequential], order: list[int], given: list[torch.Tensor]) -> nn.Module:
    soup, number = copy.deepcopy(nets[order[0]]), 1
    for member in order[1:]:
        newcomer = copy.deepcopy(nets[member])
        align_(newcomer, soup, given)
        soup = average_soup([soup, newcomer], weights=[number / (number + 1), 1 / (number + 1)])
        number += 1
    return soup


@pytest.mark.parametrize("as_population", [True, False])
def test_each_member_is_aligned_to_the_average_soup_before_it_joins(as_population: bool) -> None:
    nets = members()
    before = copy.deepcopy(nets)
    order = sorted(range(SIZE), key=lambda index: -first_weight(nets[index]))
    soups = aligned_soups(Population(nets) if as_population else nets, first_weight, batches())
    assert same(soups.average, reference_average(before, order, batches()), tolerance=1e-6)
    assert all(same(net, old) for net, old in zip(nets, before, strict=True))


def test_the_greedy_soup_tries_aligned_members_and_scores_at_least_the_best() -> None:
    (model, other, _), given = members(), batches()
    found = symmetries(model, given[0])
    twin = copy.deepcopy(model)
    permute_all_(twin, found, random_permutations(found))
    nets = [other, model, twin]

    def score(net: nn.Sequential) -> float:
        """The negative difference between the outputs of a network and of `model`."""
        return -float((net(given[0]) - model(given[0])).abs().max().detach().round(decimals=4))

    soups = aligned_soups(nets, score, given)
    assert soups.greedy.members == (1, 2)
    assert same(soups.greedy.network, model, tolerance=1e-6)
    assert soups.greedy.score >= max(soups.greedy.member_scores)
    assert [trial.members for trial in soups.greedy.trials] == [(1, 2), (1, 2, 0)]
    assert greedy_soup(nets, score).members == (1,)  # without alignment, no member joins


def test_soups_are_repaired_toward_their_aligned_members() -> None:
    nets, given = members(), batches()
    soups = aligned_soups(nets[:2], first_weight, given, repair_batches=given)
    first, second = sorted(nets[:2], key=lambda net: -first_weight(net))
    aligned = copy.deepcopy(second)
    align_(aligned, first, given)
    expected = average_soup([first, aligned])
    repair_(expected, [first, aligned], given)
    assert same(soups.average, expected, tolerance=1e-5)


def test_an_empty_soup_is_refused() -> None:
    with pytest.raises(SoupError, match="at least one network"):
        aligned_soups([], first_weight, batches())
