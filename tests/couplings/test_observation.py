"""What rules look at and remember: the same on every process, and after a resume."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import papa
from helpers import assert_same_bits, make_networks, small_training, snapshot
from papa.core import mixing
from papa.core.averager import Averager
from papa.core.population import Population
from papa.core.rules import AveragingContext, Push, Rule
from papa.couplings.observation import Probe, gradient_norms, loss_of_mean, losses_of_members
from papa.errors import MixingError, RunError
from papa.training.checkpoints import expected_states, load_state_, member_states, shared_state


def size_of_weights(network: nn.Module) -> float:
    return sum(float(parameter.detach().double().square().sum()) for parameter in network.parameters())


@dataclass(frozen=True)
class PushByNumbers(Rule):
    """A push whose strength is what the rule saw so far."""

    probe: Probe = size_of_weights
    _: KW_ONLY
    every_steps: int = 2

    is_merge: ClassVar[bool] = False
    is_for_any_size: ClassVar[bool] = True

    def see(self, population: Population, context: AveragingContext) -> AveragingContext:
        losses, mean_loss = losses_of_members(population, self.probe), loss_of_mean(population, self.probe)
        return replace(context, losses=losses, mean_loss=mean_loss)

    def initial_state(self, size: int) -> dict[str, Any]:
        return {"total": 0.0, "seen": []}

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        assert context.losses is not None
        assert context.mean_loss is not None
        assert context.distances is not None
        seen = [context.step, context.mean_loss, *context.losses, *context.distances]
        return {"total": context.state["total"] + context.mean_loss, "seen": [*context.state["seen"], seen]}

    def keep(self, context: AveragingContext) -> float:
        return 1.0 / (1.0 + abs(math.sin(context.state["total"])))

    def matrix(self, context: AveragingContext) -> Tensor:
        return mixing.push(context.size, self.keep(context))


@dataclass(frozen=True)
class ChangingItsState(PushByNumbers):
    """The same, with a state that it changes in place."""

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        new = super().next_state(context)
        context.state["seen"].append(new["seen"][-1])
        assert isinstance(context.state, dict)
        context.state["total"] = new["total"]
        return context.state


def test_a_rule_may_change_its_state_in_place() -> None:
    plain, changing = averager_of(), Averager(Population(make_networks("linear", 3)), ChangingItsState())
    saved = []
    for _ in range(4):
        plain.step()
        changing.step()
        saved.append(changing.rule_state)
    assert changing.rule_state == plain.rule_state
    assert [len(state["seen"]) for state in saved] == [0, 1, 1, 2]


def averager_of(**options: Any) -> Averager:
    return Averager(Population(make_networks("linear", 3)), PushByNumbers(**options))


def test_a_rule_sees_the_members_and_their_mean() -> None:
    averager = averager_of()
    population = averager.population
    expected = [size_of_weights(net) for net in population]
    mean = size_of_weights(papa.average_soup(population))
    distances = population.distances().tolist()
    averager.step()
    record = averager.step()
    ((step, *seen),) = averager.rule_state["seen"]
    assert step == 2
    assert seen == [mean, *expected, *distances]
    assert record.alpha == 1.0 / (1.0 + abs(math.sin(mean)))
    assert record.distances_after == tuple(record.alpha * distance for distance in distances)


def test_a_rule_sees_only_active_members() -> None:
    averager = averager_of(every_steps=1)
    averager.population.dropped = frozenset({1})
    averager.step()
    seen = averager.rule_state["seen"][0]
    assert math.isnan(seen[3])
    context = AveragingContext(step=1, size=3, lr_ratio=1.0, losses=(1.0, 2.0, 3.0), gradient_norms=(4.0, 5.0, 6.0))
    assert context.among([0, 2]).losses == (1.0, 3.0)
    assert (context.among([0, 2]).size, context.among([2]).gradient_norms) == (2, (6.0,))


def test_a_state_dict_holds_what_the_rule_remembers() -> None:
    averager, twin = averager_of(), averager_of()
    for _ in range(3):
        averager.step()
    state = json.loads(json.dumps(averager.state_dict()))
    for ours, theirs in zip(averager.population, twin.population, strict=True):
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    twin.load_state_dict(state)
    assert averager.step() == twin.step()
    assert averager.rule_state == twin.rule_state
    for ours, theirs in zip(averager.population, twin.population, strict=True):
        assert_same_bits(snapshot(ours), snapshot(theirs))


def test_a_state_of_another_rule_is_refused() -> None:
    averager = averager_of()
    state = averager.state_dict()
    with pytest.raises(MixingError, match=r"the state of PushByNumbers is \{'other': 1\}, expected total, seen"):
        averager.load_state_dict({**state, "rule": {"other": 1}})
    averager.load_state_dict({key: value for key, value in state.items() if key != "rule"})
    assert averager.rule_state == {"total": 0.0, "seen": []}
    plain = Averager(Population(make_networks("linear", 3)), Push(alpha=0.9))
    assert "rule" not in plain.state_dict()


def test_a_checkpoint_holds_what_the_rule_remembers() -> None:
    def training_with_rule() -> Any:
        return small_training(rule=PushByNumbers(every_steps=2), num_epochs=2)

    whole, begun, resumed = training_with_rule(), training_with_rule(), training_with_rule()
    whole.run()
    while begun.step < 5:
        begun._take_step()
    members = {member: (copy.deepcopy(t), n) for member, (t, n) in member_states(begun).items()}
    shared = json.loads(json.dumps(shared_state(begun)))
    assert expected_states(resumed).keys() == members.keys()
    with pytest.raises(RunError, match="the checkpoint is of another rule: the state of PushByNumbers is"):
        load_state_(resumed, 5, {**shared, "rule": {}}, copy.deepcopy(members))
    load_state_(resumed, 5, shared, members)
    resumed.run()
    assert resumed.averager.rule_state == whole.averager.rule_state
    for ours, theirs in zip(whole.population, resumed.population, strict=True):
        assert_same_bits(snapshot(ours), snapshot(theirs))


def test_a_missing_probe_is_reported() -> None:
    with pytest.raises(
        MixingError, match="ScoreWeightedPush has None as its probe, expected a function from a network"
    ):
        Averager(Population(make_networks("linear", 3)), papa.ScoreWeightedPush(None))


def test_gradient_norms_are_those_of_the_last_backward_pass() -> None:
    population = Population(make_networks("linear", 2))
    with pytest.raises(MixingError, match="member 0 has no gradients, and the rule needs their norm"):
        gradient_norms(population)
    for network in population:
        network(torch.randn(4, 3)).square().sum().backward()
    flat = [torch.cat([parameter.grad.flatten() for parameter in network.parameters()]) for network in population]
    assert gradient_norms(population) == pytest.approx([float(one.norm()) for one in flat])
