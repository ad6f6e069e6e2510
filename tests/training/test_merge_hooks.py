import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers import small_training, snapshot
from papa import Averager, Independent, MergeAll, Population, Push, average_soup
from papa.align import align_
from papa.core.rules import AveragingContext
from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.outcome import finalize_run
from papa.repair import repair_, reset_batch_norm_
from papa.training import Align, Callback, Repair, Training
from papa.training.checkpoints import load_state_, member_states, shared_state


class BeforeMerge(Callback):
    """Keeps the members as they were before the first merge, and as they are after it."""

    def __init__(self) -> None:
        self.before: list[nn.Module] = []
        self.after: list[nn.Module] = []

    def on_train_begin(self, training: Training) -> None:
        mix_, population = training.population.mix_, training.population

        def keep(matrix: object, **how: Any) -> None:
            if not self.before:
                self.before = copy.deepcopy(list(population))
            mix_(matrix, **how)

        training.population.mix_ = keep  # type: ignore[method-assign]

    def on_averaging(self, training: Training, averaging: object) -> None:
        if not self.after:
            self.after = copy.deepcopy(list(training.population))


def merged(align: Align | None = None, **repair: Any) -> tuple[Training, BeforeMerge]:
    training, seen = small_training(align=align, repair=Repair(num_batches=2, **repair)), BeforeMerge()
    training.run([seen])
    return training, seen


def assert_close(first: nn.Module, second: nn.Module) -> None:
    for name, value in snapshot(second).items():
        torch.testing.assert_close(snapshot(first)[name].double(), value.double(), rtol=1e-4, atol=1e-5)


def test_own_policies_repair_each_child_on_its_members_own_data() -> None:
    training, seen = merged()
    theirs = [training.batches.repair_batches(member) for member in range(3)]
    for member, found in enumerate(seen.after):
        expected = average_soup(seen.before)
        repair_(expected, seen.before, theirs[member], parent_batches=theirs)
        assert_close(found, expected)


def test_a_shared_policy_repairs_all_on_plain_data() -> None:
    training, seen = merged(own_policies=False)
    plain = training.batches.plain_repair()
    expected = average_soup(seen.before)
    repair_(expected, seen.before, plain)
    for found in seen.after:
        assert_close(found, expected)


@pytest.mark.parametrize("own_policies", [True, False])
def test_batch_norm_only_leaves_the_average_and_re_estimates_its_statistics(own_policies: bool) -> None:
    training, seen = merged(scope="batch-norm", own_policies=own_policies)
    for member, found in enumerate(seen.after):
        batches = training.batches.repair_batches(member) if own_policies else training.batches.plain_repair()
        assert_close(found, reset_batch_norm_(average_soup(seen.before), batches))


def test_pushes_are_not_repaired() -> None:
    assert small_training(rule=Push(alpha=0.9)).averager.merge_hooks == []
    assert small_training(repair=None).averager.merge_hooks == []


def test_batch_norm_only_needs_batch_norm() -> None:
    with pytest.raises(ConfigError, match="re-estimate BatchNorm only, but Linear has no BatchNorm layer"):
        small_training(make_model=lambda: nn.Linear(4, 3), repair=Repair(scope="batch-norm"))


def test_repair_around_a_merge_that_fails_leaves_members_as_they_were() -> None:
    training = small_training()
    training.population[1][0].weight.data[0] = float("nan")  # type: ignore[index]
    before = [snapshot(net) for net in training.population]
    averager = Averager(
        training.population, MergeAll(every_steps=1), merge_hooks=training.averager.merge_hooks, on_nonfinite=None
    )
    with pytest.raises(Exception, match="member 1 has activations that are not finite at '0'"):
        averager.step()
    for net, state in zip(training.population, before, strict=True):
        for name, value in snapshot(net).items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=0, equal_nan=True)


def test_a_population_may_be_repaired_by_hand() -> None:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    batches: list[Tensor] = [torch.randn(16, 4)]
    population = Population(copy.deepcopy(nets))
    population.mix_([[0.5, 0.5], [0.5, 0.5]])
    assert repair_(population[0], nets, batches).repaired == ("0",)


@pytest.mark.parametrize("by", ["activations", "weights", "sinkhorn"])
def test_members_are_matched_to_the_first_before_they_are_merged(by: str) -> None:
    training, seen = merged(Align(by=by, num_batches=2))
    _, apart = merged()
    inputs = training.batches.plain(2)
    for found, before in zip(seen.before, apart.before, strict=True):
        torch.testing.assert_close(found.eval()(inputs[0]), before.eval()(inputs[0]), rtol=1e-4, atol=1e-5)
    assert_close(seen.before[0], apart.before[0])
    assert not torch.allclose(seen.before[1].get_parameter("0.weight"), apart.before[1].get_parameter("0.weight"))
    for member in (1, 2):
        again = align_(seen.before[member], seen.before[0], inputs, by=by)
        assert again.after == pytest.approx(again.before)


@pytest.mark.parametrize("align_momentum", [True, False])
def test_momentum_moves_with_the_units_unless_it_is_left_behind(align_momentum: bool) -> None:
    training = small_training(align=Align(by="weights", move_momentum=align_momentum))
    training._take_step()
    momentum = [snapshot_of_momentum(optimizer) for optimizer in training.optimizers]
    hook, _ = training.averager.merge_hooks
    matrix = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    with hook(training.population, matrix, AveragingContext(step=1, size=3, lr_ratio=1.0)):
        pass
    moved = [
        any(not torch.equal(old, new) for old, new in zip(before, snapshot_of_momentum(optimizer), strict=True))
        for before, optimizer in zip(momentum, training.optimizers, strict=True)
    ]
    assert moved == [False, align_momentum, align_momentum]


def snapshot_of_momentum(optimizer: Optimizer) -> list[Tensor]:
    return [state["momentum_buffer"].clone() for state in optimizer.state.values()]


def test_the_scope_of_repair_reaches_merges_and_the_outcome() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))

    for scope, layers in (("all", ["0", "2"]), ("activations", ["0"])):
        training = small_training(make_model=net, repair=Repair(num_batches=2, scope=scope))  # type: ignore[arg-type]
        seen = BeforeMerge()
        training.run([seen])
        theirs = [training.batches.repair_batches(member) for member in range(3)]
        expected = average_soup(seen.before)
        report = repair_(expected, seen.before, theirs[0], parent_batches=theirs, scope=scope)  # type: ignore[arg-type]
        assert list(report.repaired) == layers
        assert_close(seen.after[0], expected)
        assert finalize_run(training, Config()).to_json()["repair"]["repaired"] == layers


class States(Callback):
    """Keeps the members' numbers after every step, and what a checkpoint would hold."""

    def __init__(self) -> None:
        self.states: list[list[dict[str, Tensor]]] = []
        self.checkpoints: list[Any] = []

    def on_step_complete(self, training: Training) -> None:
        self.states.append([snapshot(net) for net in training.population])
        self.checkpoints.append(copy.deepcopy((training.step, shared_state(training), member_states(training))))


def test_pushes_align_members_at_their_own_cadence_which_survives_a_resume() -> None:
    def build(align: str | None) -> Training:
        options = None if align is None else Align(by=align, every_epochs=2, num_batches=2)
        return small_training(rule=Push(alpha=0.9, every_steps=3), align=options)

    plain, aligned, resumed = States(), States(), States()
    build(None).run([plain])
    build("activations").run([aligned])
    same = [
        all(torch.equal(first[name], second[name]) for name in first)
        for first, second in ((ours[1], theirs[1]) for ours, theirs in zip(plain.states, aligned.states, strict=True))
    ]
    assert same == [True] * 11 + [False] * 4  # the first push in every ten steps is at 12
    training = build("activations")
    load_state_(training, *aligned.checkpoints[6])
    training.run([resumed])
    for first, second in zip(resumed.states[-1], aligned.states[-1], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_independent_members_are_not_aligned() -> None:
    assert small_training(rule=Independent(), align=Align(by="weights"), repair=None).averager.merge_hooks == []
