"""Pushes that land later: the update, the mean they keep, their stability, and stopping on the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from helpers import assert_same_bits, make_networks, small_training, snapshot
from papa import Averager, MergeAll, Population, Push
from papa.errors import MemberError, MixingError
from papa.training import Callback, Training
from papa.training.state import load_state_, member_states, shared_state


def drift_(population: Population, step: int) -> None:
    for member, net in enumerate(population):
        generator = torch.Generator().manual_seed(100 * step + member)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("kind", ["linear", "conv_batch_norm", "mixed_dtypes"])
def test_each_member_moves_by_what_it_was_off_the_mean_when_the_push_began(kind: str) -> None:
    population = Population(make_networks(kind, 3))
    averager = Averager(population, Push(alpha=0.75, every_steps=4, delay=2))
    for step in range(1, 7):
        drift_(population, step)
        if step == 4:
            then = [snapshot(net) for net in population]
        before = [snapshot(net) for net in population]
        log = averager.step()
        assert (log is not None) == (step == 6)
    assert log is not None
    assert (log.step, log.alpha, log.distances_after) == (6, 0.75, None)
    for member, net in enumerate(population):
        for name in population.averaged:
            mean = torch.stack([state[name].double() for state in then]).mean(dim=0)
            expected = before[member][name].double() + 0.25 * (mean - then[member][name].double())
            found = snapshot(net)[name]
            tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}[found.dtype]
            assert (found.double() - expected).abs().max() <= tolerance * (1 + expected.abs().max())


def test_the_distances_that_are_logged_are_those_at_the_beginning() -> None:
    population = Population(make_networks("linear", 3))
    averager = Averager(population, Push(alpha=0.75, every_steps=4, delay=2))
    for step in range(1, 7):
        drift_(population, step)
        if step == 4:
            expected = population.distances().tolist()
        log = averager.step()
    assert log is not None
    assert log.distances_before == pytest.approx(expected, rel=1e-5)


def test_the_mean_of_the_population_stays_where_training_brought_it() -> None:
    population = Population([net.double() for net in make_networks("linear", 4)])
    averager = Averager(population, Push(alpha=0.2, every_steps=4, delay=2))
    for step in range(1, 21):
        drift_(population, step)
        before = population.mean()
        averager.step()
        assert (population.mean() - before).abs().max() < 1e-12


def deviation_after(keep: float, delay: int, decay: float, every_steps: int = 10, cadences: int = 40) -> float:
    """Two members on a parabola: gradient descent multiplies their deviation by `decay` at every step."""
    deviation, started = 1.0, 0.0
    for step in range(1, every_steps * cadences + 1):
        deviation *= decay
        if delay == 0 and step % every_steps == 0:
            deviation *= keep
        if delay and step % every_steps == delay and step > every_steps:
            deviation -= (1 - keep) * started
        if step % every_steps == 0:
            started = deviation
    return abs(deviation)


@pytest.mark.parametrize("decay", [0.999, 0.9, -0.9, -0.999])
@pytest.mark.parametrize("delay", [2, 4, 6, 8])
def test_even_delays_contract_wherever_descent_does(decay: float, delay: int) -> None:
    for keep in (0.99, 0.9, 0.7):
        assert deviation_after(keep, delay, decay) <= deviation_after(1.0, 0, decay)


def test_odd_delays_drive_members_apart_where_steps_overshoot() -> None:
    for delay in (1, 3, 5):
        assert deviation_after(0.9, delay, -0.999) > 10 > 1 > deviation_after(0.9, delay + 1, -0.999)


def test_the_simulation_has_the_factor_of_the_docs() -> None:
    keep, delay, decay = 0.9, 4, -0.97
    one, more = (deviation_after(keep, delay, decay, cadences=count) for count in (20, 21))
    assert more / one == pytest.approx(abs(decay**10 - (1 - keep) * decay ** (10 - delay)))


@pytest.mark.parametrize("stop_at", range(1, 13))
def test_an_averager_that_was_stopped_goes_on_to_the_same_bits(stop_at: int) -> None:
    networks = make_networks("mixed_dtypes", 3)
    rule = Push(alpha=0.7, every_steps=4, delay=2)
    whole = Population(copy.deepcopy(networks))
    averager = Averager(whole, rule)
    logs = []
    for step in range(1, 13):
        drift_(whole, step)
        logs.append(averager.step())
    broken = Population(copy.deepcopy(networks))
    averager, found = Averager(broken, rule), []
    for step in range(1, 13):
        drift_(broken, step)
        found.append(averager.step())
        if step == stop_at:
            state = copy.deepcopy(averager.state_dict())
            broken = Population(copy.deepcopy(list(broken)))
            averager = Averager(broken, rule)
            averager.load_state_dict(state)
    assert found == logs
    for rows, expected in zip(broken.matrices.values(), whole.matrices.values(), strict=True):
        assert torch.equal(rows, expected)


def test_a_push_that_would_land_after_the_end_is_not_begun() -> None:
    rule = Push(alpha=0.99, every_steps=10, delay=4)
    assert rule.is_due(20)
    assert rule.is_due(20, num_steps=24)
    assert not rule.is_due(20, num_steps=23)


def test_bad_delays_are_refused() -> None:
    with pytest.raises(MixingError, match=r"delay=10, expected less than every_steps \(10\)"):
        Push(alpha=0.99, every_steps=10, delay=10)
    with pytest.raises(MixingError, match="delay=3, expected an even number of steps"):
        Push(alpha=0.99, every_steps=10, delay=3)
    with pytest.raises(MixingError, match="delay is -2, expected a whole number"):
        Push(alpha=0.99, every_steps=10, delay=-2)
    population = Population([nn.Linear(2, 2) for _ in range(2)])
    with pytest.raises(MixingError, match="cannot have merge hooks"):
        Averager(population, Push(alpha=0.99, every_steps=4, delay=2), merge_hooks=lambda *_: torch.no_grad())  # type: ignore[arg-type]
    assert Averager(population, MergeAll(every_steps=1), merge_hooks=lambda *_: torch.no_grad()) is not None  # type: ignore[arg-type]


def test_a_member_found_non_finite_when_a_push_starts_is_reported_at_once_and_survives_a_resume() -> None:
    population = Population(make_networks("linear", 3))
    rule = Push(alpha=0.75, every_steps=4, delay=2)
    averager = Averager(population, rule, on_nonfinite="drop")
    for step in range(1, 7):
        drift_(population, step)
        if step == 4:
            next(population[1].parameters()).data[0] = float("nan")
        log = averager.step()
        assert [found.member for found in averager.found_nonfinite] == ([1] if step == 4 else [])
        if step == 5:
            state = copy.deepcopy(averager.state_dict())
            population.dropped = frozenset()
            averager = Averager(population, rule, on_nonfinite="drop")
            averager.load_state_dict(state)
    assert log is not None
    assert [(found.step, found.member) for found in log.nonfinite] == [(4, 1)]
    assert population.dropped == {1}
    assert "nonfinite_at_start" not in averager.state_dict()


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_a_training_saved_right_after_keeps_it_too(policy: str) -> None:
    class Poison(Callback):
        def on_step_begin(self, training: Training) -> None:
            if training.step == 3:
                next(training.population[2].parameters()).data.fill_(float("nan"))

    class Save(Callback):
        def on_step_complete(self, training: Training) -> None:
            if training.step == 5:
                saved.append(copy.deepcopy((5, shared_state(training), member_states(training))))

    saved: list[tuple[int, dict[str, Any], Any]] = []
    options = {"rule": Push(alpha=0.75, every_steps=4, delay=2), "on_nonfinite": policy}
    whole = small_training(**options)
    whole.run([Poison(), Save()])
    assert [(event["step"], event["member"]) for event in whole.nonfinite] == [(4, 2)]
    resumed = small_training(**options)
    load_state_(resumed, *saved[0])
    resumed.run()
    assert resumed.nonfinite == whole.nonfinite
    assert resumed.population.dropped == whole.population.dropped
    for one, other in zip(whole.population, resumed.population, strict=True):
        assert_same_bits(snapshot(one), snapshot(other))


def test_another_memory_order_during_a_delayed_push_is_reported() -> None:
    nets = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)) for _ in range(2)]
    averager = Averager(Population(nets), Push(alpha=0.5, every_steps=4, delay=2))
    for _ in range(5):
        averager.step()
    for net in nets:
        net.to(memory_format=torch.channels_last)
    with pytest.raises(MemberError, match="converted to another memory order during a delayed push"):
        averager.step()
