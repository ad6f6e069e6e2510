"""What every rule must do, whatever it is: the suite that a new rule joins by one line in `rule_cases.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import group_jobs
import rule_cases
from helpers import assert_close, small_training
from papa.core.averager import Averager
from papa.core.group import LocalGroup
from papa.core.rules import AveragingContext, Independent
from papa.couplings.coupling import Coupling
from papa.distributed.start import start_workers
from papa.training.checkpoints import load_state_, member_states, shared_state
from rule_cases import CASES, SIZE, VARIANTS, make_population, run_rule, step_

ALL = {**CASES, **VARIANTS}

pytestmark = pytest.mark.filterwarnings("ignore:a push that leaves members:UserWarning")  # some weights are bfloat16


@pytest.fixture(scope="module")
def local() -> dict[str, Any]:
    return rule_cases.run_every_rule(LocalGroup)


@pytest.fixture(scope="module")
def in_processes() -> dict[str, Any]:
    """Two processes with shared memory, with staged shared memory, and with messages."""
    found: dict[str, Any] = start_workers(rule_cases.run_in_workers, 2, SIZE)
    return found


@pytest.mark.parametrize("name", ALL)
def test_it_does_what_its_twin_does(name: str) -> None:
    population = make_population(kind="conv_batch_norm").to(torch.float64)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in population]
    rule = ALL[name](SIZE)
    averager = Averager(population, rule, optimizers, measure=False)
    memory: dict[str, Any] = {
        "members": population.matrix.clone(),
        "anchor": population.matrix.mean(dim=0),
        "num_parameters": population.layout.num_parameter_columns[torch.float64],
    }
    for step in range(1, 6):
        step_(population, optimizers, step)
        grads = [torch.cat([p.grad.flatten() for p in net.parameters()]) for net in population]
        memory["norms"] = [float(grad.norm()) for grad in grads]
        context = AveragingContext(step=step, size=SIZE, lr_ratio=1.0)
        mask = rule.mask(context, population.layout) if isinstance(rule, Coupling) else None
        expected = population.matrix.clone()
        if rule.is_due(step):
            expected = ALL[name].twin(rule, expected, context, memory, mask)
        averager.step()
        assert_close(population.matrix, expected, 1e-12)


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(name: str, local: dict[str, Any]) -> None:
    whole = run_rule(ALL[name](SIZE), nonfinite_at=None if name == "Independent" else 4)
    assert group_jobs.identical(local[name], whole)


@pytest.mark.parametrize("kind", ["shared", "staged", "distributed"])
@pytest.mark.parametrize("name", ALL)
def test_several_processes_have_the_bits_of_one(
    name: str, kind: str, local: dict[str, Any], in_processes: dict[str, Any]
) -> None:
    assert group_jobs.identical(in_processes[kind][name], local[name])


@pytest.mark.parametrize("name", ALL)
def test_a_non_finite_member_never_reaches_the_others(name: str) -> None:
    results = run_rule(ALL[name](SIZE), nonfinite_at=4)
    found = [one for log in results["logs"] if log is not None for one in log.nonfinite]
    averages = not isinstance(ALL[name](SIZE), Independent)
    assert [one.member for one in found] == ([2] if averages else [])
    for member, state in enumerate(results["states"]):
        is_finite = all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
        assert is_finite == (averages or member != 2)


@pytest.mark.parametrize("name", [name for name in CASES if not isinstance(CASES[name](2), Independent)])
def test_a_dropped_member_takes_no_part(name: str) -> None:
    found = run_rule(CASES[name](SIZE), nonfinite_at=3, policy="drop")
    for state in found["states"]:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@pytest.mark.parametrize("name", ALL)
def test_a_training_resumes_to_the_same_bits(name: str) -> None:
    def training() -> Any:
        return small_training(rule=ALL[name](3), num_epochs=2, on_nonfinite="restart", repair=None)

    whole, begun, resumed = training(), training(), training()
    whole.run()
    while begun.step < 5:
        begun._take_step()
    members = {member: (copy.deepcopy(tensors), numbers) for member, (tensors, numbers) in member_states(begun).items()}
    load_state_(resumed, 5, copy.deepcopy(shared_state(begun)), members)
    resumed.run()
    for ours, theirs in zip(whole.population, resumed.population, strict=True):
        assert group_jobs.identical(ours.state_dict(), theirs.state_dict())
