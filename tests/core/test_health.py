"""Non-finite members: found, skipped by index, and restarted or dropped, on one process and on several."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from group_jobs import average_with_nonfinite_members
from helpers import assert_close, assert_same_bits, make_networks, snapshot
from papa import Averager, MergeAll, MergePairs, Mix, Population, Push, average_soup, greedy_soup
from papa.core import mixing
from papa.core.group import LocalGroup
from papa.core.product import is_finite
from papa.couplings.anchored import Elastic, Lookahead, OuterStep
from papa.distributed.start import start_workers
from papa.errors import MemberError, PapaWarning

pytestmark = pytest.mark.filterwarnings("ignore:member .* the averager was not given its optimizer:UserWarning")
BAD = [math.nan, math.inf, -math.inf]


def poisoned(member: int, value: float, *, size: int = 4, buffers: bool = False) -> Population:
    population = Population(make_networks("conv_batch_norm", size))
    with torch.no_grad():
        tensors = population[member].buffers() if buffers else population[member].parameters()
        next(tensors).view(-1)[1] = value
    return population


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("buffers", [True, False])
def test_a_non_finite_member_restarts_from_the_mean_of_the_healthy(value: float, measure: bool, buffers: bool) -> None:
    population = poisoned(2, value, buffers=buffers)
    healthy = [snapshot(population[member]) for member in (0, 1, 3)]
    averager = Averager(population, Push(alpha=0.5, every_steps=1), measure=measure)
    averaging = averager.step()
    assert averaging is not None
    assert [(found.member, found.action) for found in averaging.nonfinite] == [
        (2, "restarted from the mean of the healthy")
    ]
    for name in population.averaged:
        mean = sum(state[name].double() for state in healthy) / 3
        assert_close(snapshot(population[2])[name], mean, 1e-5)
        for state, member in zip(healthy, (0, 1, 3), strict=True):
            assert_close(snapshot(population[member])[name], 0.5 * state[name].double() + 0.5 * mean, 1e-5)
    if measure:
        assert averaging.distances_before is not None
        assert all(math.isfinite(distance) for distance in averaging.distances_before)
        assert averaging.distances_before[2] < 1e-3


def test_looking_changes_no_bit_of_the_healthy() -> None:
    population = poisoned(1, math.nan)
    before = {member: snapshot(population[member]) for member in (0, 2, 3)}
    averager = Averager(population, Push(alpha=0.99, every_steps=100))
    assert [found.member for found in averager.check_health()] == [1]
    for member, state in before.items():
        assert_same_bits(snapshot(population[member]), state)
    assert averager.check_health() == ()


@pytest.mark.parametrize(
    "rule",
    [
        Push(alpha=0.7, every_steps=1),
        MergeAll(every_steps=1),
        MergePairs(every_steps=1),
        Mix(mixing.merge_many(4), every_steps=1),
    ],
)
def test_a_dropped_member_counts_nowhere(rule: Any) -> None:
    population = poisoned(0, math.nan)
    averager = Averager(population, rule, on_nonfinite="drop")
    first = averager.step()
    assert first is not None
    assert first.nonfinite[0].action == "dropped"
    assert population.active == (1, 2, 3)
    with torch.no_grad():
        for parameter in population[0].parameters():
            parameter.fill_(1e30)  # whatever becomes of it
    states = [snapshot(population[member]) for member in (1, 2, 3)]
    soup, greedy = average_soup(population), greedy_soup(population, lambda net: float(net[0].weight.detach().sum()))
    for name in population.averaged:
        mean = sum(state[name].double() for state in states) / 3
        assert_close(snapshot(soup)[name], mean, 1e-5)
    assert 0 not in greedy.members
    assert math.isnan(greedy.member_scores[0])
    averaging = averager.step()
    assert averaging is not None
    assert averaging.nonfinite == ()
    for member in (1, 2, 3):
        assert all(float(tensor.detach().abs().max()) < 1e6 for tensor in population[member].parameters())


@pytest.mark.parametrize("policy", ["restart", "drop"])
@pytest.mark.parametrize("rule", [Elastic, Lookahead, OuterStep])
def test_a_member_that_is_non_finite_when_anchors_start_does_not_reach_the_others(rule: Any, policy: Any) -> None:
    networks = make_networks("linear", 4)
    averager = Averager(Population(networks), rule(every_steps=2, start=4), on_nonfinite=policy, watch_batches=False)
    found: list[int] = []
    for step in range(1, 9):
        if step == 3:
            spoil(networks[1])
        report = averager.step()
        found += [one.member for one in report.nonfinite] if report else []
    assert found == [1]
    assert all(torch.isfinite(rows).all() for rows in averager.population.matrices.values())


def spoil(network: nn.Module) -> None:
    with torch.no_grad():
        next(iter(network.parameters())).view(-1)[0] = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("size", "sick"), [(2, {0}), (3, {0, 1}), (4, {3}), (6, {0, 5})])
def test_the_healthy_keep_even_the_sign_of_zero(dtype: torch.dtype, size: int, sick: set[int]) -> None:
    population = Population([nn.Linear(40, 7).to(dtype) for _ in range(size)])
    with torch.no_grad():
        for network in population:
            network.weight[0, :5] = -0.0
        for member in sick:
            spoil(population[member])
    (rows,) = population.matrices.values()
    before = rows.clone()
    Averager(population, MergeAll(every_steps=2)).check_health()
    healthy = [member for member in range(size) if member not in sick]
    assert torch.equal(rows[healthy].view(torch.uint8), before[healthy].view(torch.uint8))
    assert torch.isfinite(rows).all()


def test_stopping_and_a_population_without_a_healthy_member_are_errors_that_name_it() -> None:
    population = poisoned(3, math.inf)
    with pytest.raises(MemberError, match=r"a member is non-finite at step 1 \(member 3: its weights are not finite\)"):
        Averager(population, MergeAll(every_steps=1), on_nonfinite="stop").step()
    with pytest.raises(MemberError, match="all members are non-finite"):
        Averager(poisoned(0, math.nan, size=1), MergeAll(every_steps=1)).step()
    with pytest.raises(MemberError, match="on_nonfinite is 'restrat': did you mean restart"):
        Averager(population, MergeAll(every_steps=1), on_nonfinite="restrat")


def test_not_looking_lets_the_mean_be_poisoned_which_shows_that_looking_is_needed() -> None:
    population = poisoned(2, math.nan)
    Averager(population, Push(alpha=0.5, every_steps=1), on_nonfinite=None).step()
    assert not any(population.is_finite(index) for index in range(4))


def test_a_restarted_member_has_a_fresh_optimizer_and_the_others_keep_theirs() -> None:
    population = Population([nn.Linear(3, 2) for _ in range(3)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
    for net, optimizer in zip(population, optimizers, strict=True):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    momentum = optimizers[0].state[population[0].weight]["momentum_buffer"].clone()
    with torch.no_grad():
        population[1].bias[0] = math.nan
    Averager(population, MergeAll(every_steps=1), optimizers).step()
    assert [len(optimizer.state) for optimizer in optimizers] == [2, 0, 2]
    assert torch.equal(optimizers[0].state[population[0].weight]["momentum_buffer"], momentum)


def test_a_restarted_member_whose_optimizer_is_unknown_is_reported() -> None:
    population = poisoned(1, math.nan)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
    with pytest.warns(PapaWarning, match="no optimizer of member 1"):
        averager = Averager(population, MergeAll(every_steps=1), [optimizers[0], *optimizers[2:]])
    with pytest.warns(UserWarning, match="member 1 was restarted, but the averager was not given its optimizer"):
        averager.step()


def test_what_is_not_averaged_comes_from_a_healthy_member() -> None:
    population = Population([nn.Linear(3, 2) for _ in range(3)], average={"bias": False})
    with torch.no_grad():
        population[0].bias.fill_(math.nan)
        population[0].weight.fill_(math.nan)
    Averager(population, MergeAll(every_steps=1)).step()
    assert torch.equal(population[0].bias, population[1].bias)


def test_numbers_too_large_to_add_up_are_finite() -> None:
    row = torch.full((64,), 3e38)
    assert is_finite(row)
    assert not is_finite(torch.cat([row, torch.tensor([math.nan])]))
    assert is_finite(torch.full((64,), 6e4, dtype=torch.float16))


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_two_ranks_agree_on_who_is_sick_and_end_with_the_bits_of_one(policy: str) -> None:
    alone = average_with_nonfinite_members(LocalGroup(), policy)
    together = start_workers(average_with_nonfinite_members, 2, 5, policy)
    assert alone["nonfinite"] == together["nonfinite"]
    assert [found.member for found in alone["nonfinite"]] == [3, 0]
    for first, second in zip(alone["states"], together["states"], strict=True):
        assert_same_bits(second, first)
