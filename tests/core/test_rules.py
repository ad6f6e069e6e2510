from __future__ import annotations

import collections
import copy
import dataclasses
import math
import pickle
from typing import TypeGuard

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_same_bits, make_networks, snapshot
from papa.core import mixing
from papa.core.averager import Averager
from papa.core.population import Population
from papa.core.rules import AveragingContext, Independent, MergeAll, MergeMany, MergePairs, Mix, Push, Rule
from papa.couplings.coupling import Coupling, check_extended
from papa.errors import MixingError
from rule_cases import CASES

RULES = CASES
PUSHES = {"Push", "Push by half-life", "Push unscaled"}


def context(step: int = 10, size: int = 5, lr_ratio: float = 1.0) -> AveragingContext:
    return AveragingContext(step=step, size=size, lr_ratio=lr_ratio)


def has_rows(rule: Rule) -> TypeGuard[Coupling]:
    return isinstance(rule, Coupling) and bool(rule.extra_rows)


def points_of(rule: Coupling, size: int) -> Tensor:
    """Which rows of members and extra rows are points, and not differences."""
    extra = [[not row.is_difference] * (size if row.per_member else 1) for row in rule.extra_rows]
    return torch.tensor(sum(extra, [True] * size))


@pytest.mark.parametrize("name", RULES)
class TestEveryRule:
    @pytest.mark.parametrize("size", range(1, 11))
    def test_asks_for_a_matrix_whose_rows_sum_to_one(self, name: str, size: int) -> None:
        for step, lr_ratio in ((1, 1.0), (10, 0.5), (999, 0.0)):
            rule = RULES[name](size)
            matrix = rule.matrix(context(step, size, lr_ratio))
            assert matrix.dtype == torch.float64
            if has_rows(rule) and rule.own_matrix(context(step, size, lr_ratio)) is None:
                points = points_of(rule, size)
                assert torch.equal(check_extended(matrix, points), matrix)
                assert torch.allclose(matrix @ points.double(), points.double(), rtol=0, atol=1e-14)
                continue
            assert torch.equal(mixing.check_rows(matrix, size, signed=rule.is_signed), matrix)
            assert torch.allclose(matrix.sum(dim=1), torch.ones(size).double(), rtol=0, atol=1e-14)

    def test_keeps_a_population_of_one(self, name: str) -> None:
        population = Population(make_networks("conv_batch_norm", 1))
        before = snapshot(population[0])
        for parameter in population[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(population[0].parameters(), lr=0.1)
        averager = Averager(population, RULES[name](1, every_steps=1), optimizer)
        for _ in range(3):
            averager.step()
        if has_rows(averager.rule):  # an anchor at the same place, with weights that sum to 1
            for key, tensor in snapshot(population[0]).items():
                assert torch.allclose(tensor.double(), before[key].double(), rtol=1e-6, atol=1e-6)
        else:
            assert_same_bits(snapshot(population[0]), before)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"every_steps": 3}, [3, 6, 9, 12]),
            ({"every_steps": 2, "start": 4, "stop": 10}, [4, 6, 8]),
            ({"every_steps": 4, "start": 5}, [8, 12]),  # counted from the first step of training
            ({"every_steps": 1, "start": 4, "stop": 4}, []),
        ],
    )
    def test_is_due_at_its_cadence_within_its_window(
        self, name: str, options: dict[str, int], expected: list[int]
    ) -> None:
        rule = RULES[name](5, **options)
        assert [step for step in range(14) if rule.is_due(step)] == ([] if name == "Independent" else expected)

    def test_is_due_at_the_last_step_only_when_it_is_no_merge(self, name: str) -> None:
        rule = RULES[name](5, every_steps=5)
        assert rule.is_due(10, num_steps=10) == (not rule.is_merge and name != "Independent")
        assert rule.is_due(10, num_steps=15) == rule.is_due(10, num_steps=None) == (name != "Independent")

    @pytest.mark.parametrize("lr_ratio", [1.0, 0.3, 0.0])
    def test_says_what_members_keep_only_if_it_pushes_toward_the_mean(self, name: str, lr_ratio: float) -> None:
        rule = RULES[name](5)
        keep = rule.keep(context(lr_ratio=lr_ratio))
        assert (keep is not None) == (name in {*PUSHES, "AdaptivePush"})
        if keep is not None:
            assert torch.equal(rule.matrix(context(lr_ratio=lr_ratio)), mixing.push(5, keep))

    def test_is_frozen(self, name: str) -> None:
        rule = RULES[name](5)
        for field in dataclasses.fields(rule):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(rule, field.name, 7)

    def test_is_a_function_of_the_context(self, name: str) -> None:
        rule = RULES[name](5)
        for step in (3, 8):
            first = rule.matrix(context(step))
            torch.rand(3)
            rule.matrix(context(step + 1))
            for twin in (rule, copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
                assert torch.equal(twin.matrix(context(step)), first)

    def test_leaves_the_global_generator_alone(self, name: str) -> None:
        state = torch.get_rng_state()
        RULES[name](5).matrix(context())
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("value", [0, -1, 2.5, True, "ten"])
    def test_refuses_a_cadence_that_is_no_positive_whole_number(self, name: str, value: object) -> None:
        message = f"every_steps is {value!r}, expected a whole number of steps, at least 1"
        with pytest.raises(MixingError, match=message):
            RULES[name](5, every_steps=value)

    def test_refuses_an_invalid_window(self, name: str) -> None:
        with pytest.raises(MixingError, match="start is -1, expected a whole number of steps, at least 0"):
            RULES[name](5, start=-1)
        with pytest.raises(MixingError, match="stop is 3, expected a whole number of steps, at least 4"):
            RULES[name](5, start=4, stop=3)
        with pytest.raises(MixingError, match=r"stop is 9.5, expected a whole number of steps, at least 4"):
            RULES[name](5, start=4, stop=9.5)


@pytest.mark.parametrize("rule", [MergeAll, MergePairs, MergeMany])
def test_merges_need_a_cadence(rule: type[Rule]) -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'every_steps'"):
        rule()  # type: ignore[call-arg]


def subclasses_of(kind: type) -> list[type]:
    return [found for one in kind.__subclasses__() for found in (one, *subclasses_of(one))]


def test_every_rule_class_is_in_the_common_suite() -> None:
    tested = {type(make(2)) for make in RULES.values()}
    assert tested == {rule for rule in subclasses_of(Rule) if rule.__module__.startswith("papa.")} - {Coupling}


class TestPush:
    def test_its_cadence_and_scaling_are_the_papers(self) -> None:
        assert (Push(alpha=0.99).every_steps, Push(alpha=0.99).scale_by_lr) == (10, True)

    def test_its_matrix_is_the_equation(self) -> None:
        kept = 1 - (1 - 0.9) * 0.5
        expected = kept * torch.eye(5) + (1 - kept) / 5
        assert torch.allclose(Push(alpha=0.9).matrix(context(lr_ratio=0.5)), expected.double(), rtol=0, atol=1e-7)

    def test_it_is_the_identity_at_one_and_merges_all_at_zero(self) -> None:
        assert torch.equal(Push(alpha=1.0).matrix(context()), mixing.identity(5))
        assert torch.equal(Push(alpha=0.0).matrix(context()), mixing.merge_all(5))

    def test_it_weakens_with_the_learning_rate_unless_told_not_to(self) -> None:
        at = [context(lr_ratio=ratio) for ratio in (1.0, 0.5, 0.0)]
        assert [Push(alpha=0.8).keep(now) for now in at] == pytest.approx([0.8, 0.9, 1.0])
        assert [Push(alpha=0.8, scale_by_lr=False).keep(now) for now in at] == pytest.approx([0.8] * 3)

    def test_the_papers_strength_as_a_half_life(self) -> None:
        assert Push(alpha=0.99, every_steps=10).half_life_in_steps == pytest.approx(689.676, abs=0.001)

    @pytest.mark.parametrize("every_steps", [1, 10, 37])
    @pytest.mark.parametrize("half_life", [0.5, 100.0, 5000.0])
    def test_half_life_and_alpha_say_the_same(self, half_life: float, every_steps: int) -> None:
        rule = Push(half_life_steps=half_life, every_steps=every_steps)
        assert rule.half_life_in_steps == pytest.approx(half_life)
        assert rule.effective_alpha ** (half_life / every_steps) == pytest.approx(0.5)

    def test_half_lives_at_the_ends(self) -> None:
        assert Push(alpha=1.0).half_life_in_steps == math.inf
        assert Push(alpha=0.0).half_life_in_steps == 0.0
        assert Push(half_life_steps=math.inf).effective_alpha == 1.0

    @pytest.mark.parametrize("alpha", [-0.01, 1.01, math.nan, math.inf])
    def test_it_refuses_an_alpha_outside_the_unit_interval(self, alpha: float) -> None:
        message = rf"Push got alpha={alpha}, expected a number from 0 \(merge\) to 1 \(never push\)"
        with pytest.raises(MixingError, match=message):
            Push(alpha=alpha)

    @settings(max_examples=30, deadline=None)
    @given(share=st.floats(1e-4, 1.0), num_steps=st.integers(1, 10**6), every_steps=st.none() | st.integers(1, 20))
    def test_a_share_of_training_is_that_number_of_steps(
        self, share: float, num_steps: int, every_steps: int | None
    ) -> None:
        cadence = {} if every_steps is None else {"every_steps": every_steps}
        push = Push(half_life=share, **cadence).for_length(num_steps)
        assert push == Push(half_life_steps=share * num_steps, **cadence)
        assert every_steps or 1 <= push.every_steps <= max(1, push.half_life_in_steps + 0.5)
        assert push.for_length(num_steps + 1) is push

    def test_a_share_of_training_needs_its_length(self) -> None:
        push = Push(half_life=0.003)
        for ask in (lambda: push.is_due(5), lambda: push.effective_alpha, lambda: push.half_life_in_steps):
            with pytest.raises(
                MixingError, match=r"half_life=0.003\) is a share of training, whose length is not known"
            ):
                ask()
        assert push.is_due(10, num_steps=100_000)

    @pytest.mark.parametrize("half_life", [0.0, -0.1, math.nan, 1.5, 500])
    def test_steps_are_not_taken_for_a_share(self, half_life: float) -> None:
        with pytest.raises(
            MixingError, match=f"half_life={half_life}, expected a share .* number of steps as half_life_s"
        ):
            Push(half_life=half_life)

    @pytest.mark.parametrize("half_life", [0.0, -5, math.nan])
    def test_it_refuses_a_half_life_that_is_not_positive(self, half_life: float) -> None:
        with pytest.raises(MixingError, match=f"Push got half_life_steps={half_life}, expected a positive"):
            Push(half_life_steps=half_life)

    def test_it_needs_exactly_one_strength(self) -> None:
        with pytest.raises(MixingError, match=r"Push got half_life=0.1 and alpha=0.9, expected one of half_life, half"):
            Push(alpha=0.9, half_life=0.1)
        with pytest.raises(MixingError, match=r"Push got no strength, expected one of .* half_life=0.003 is 0.3% of"):
            Push()


class TestMergePairs:
    @pytest.mark.parametrize(("share", "num_outcomes"), [(0.5, 6), (0.75, 12)])
    def test_pairs_are_uniform_over_steps(self, share: float, num_outcomes: int) -> None:
        rule = MergePairs(share=share, seed=11, every_steps=1)
        for child in range(4):
            rows = [tuple(rule.matrix(context(step, size=4))[child].tolist()) for step in range(600)]
            counts = collections.Counter(rows)
            assert len(counts) == num_outcomes
            assert scipy.stats.chisquare(list(counts.values())).pvalue > 0.01

    def test_pairs_are_drawn_afresh_at_each_step_and_for_each_seed(self) -> None:
        drawn = [
            MergePairs(seed=seed, every_steps=1).matrix(context(step, size=8)) for seed in (0, 1) for step in (5, 10)
        ]
        assert all(not torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i])

    def test_two_members_always_become_their_mean(self) -> None:
        assert MergePairs(every_steps=1).matrix(context(size=2)).tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("rule", [MergePairs, MergeMany])
@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_shares_lie_in_the_unit_interval(rule: type[Rule], share: float) -> None:
    with pytest.raises(MixingError, match=f"share is {share}, expected a number from 0 to 1"):
        rule(share=share, every_steps=1)


class TestMix:
    def test_a_function_is_given_the_context(self) -> None:
        seen = []

        def weights(now: AveragingContext) -> Tensor:
            seen.append(now)
            return mixing.identity(now.size)

        Mix(weights, every_steps=1).matrix(context(step=7, size=3, lr_ratio=0.25))
        assert seen == [AveragingContext(step=7, size=3, lr_ratio=0.25)]

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([[1.0]], r"mixing matrix has shape \(1, 1\), expected \(2, 2\)"),
            ([[0.5, 0.6], [0.5, 0.5]], r"row 0 of the mixing matrix sums to 1.1, expected 1: divide it by its sum"),
            ([[1.0, 0.0], [-0.1, 1.1]], "row 1 of the mixing matrix is .* expected no negative weight"),
            ([[math.nan, 0.0], [0.0, 1.0]], "row 0 of the mixing matrix is .* expected finite weights"),
        ],
    )
    def test_it_refuses_weights_that_cannot_mix(self, weights: object, message: str) -> None:
        with pytest.raises(MixingError, match=message):
            Mix(weights, every_steps=1).check(2, [torch.float32])
        with pytest.raises(MixingError, match=message):
            Mix(lambda _: weights, every_steps=1).matrix(context(size=2))

    def test_a_fixed_matrix_is_looked_at_before_training(self) -> None:
        with pytest.raises(MixingError, match="row 0 of the mixing matrix sums to 2"):
            Mix([[1.0, 1.0], [0.0, 1.0]], every_steps=1000)
        for weights, shape in (
            (0.5, r"\(\)"),
            ([[0.5, 0.5]], r"\(1, 2\)"),
            ([], r"\(0,\)"),
            (torch.zeros(0, 0), r"\(0, 0\)"),
        ):
            with pytest.raises(MixingError, match=f"has shape {shape}, expected a function, or as many rows as col"):
                Mix(weights, every_steps=1)
        with pytest.raises(MixingError, match=r"cannot be read .*, expected a function, or as many rows as columns"):
            Mix("papa", every_steps=1)
        with pytest.raises(MixingError, match=r"has shape \(2, 2\), expected \(3, 3\)"):
            Averager(Population(make_networks("linear", 3)), Mix([[0.5, 0.5], [0.0, 1.0]], every_steps=1000))


def test_a_fixed_matrix_may_be_sparse_and_made_under_any_default_device() -> None:
    assert torch.equal(Mix(torch.eye(2).to_sparse(), every_steps=1).matrix(context(size=2)), mixing.identity(2))
    with torch.device("meta"):
        Mix([[0.5, 0.5], [0.5, 0.5]], every_steps=1)


def test_a_rule_without_a_matrix_says_so() -> None:
    with pytest.raises(TypeError, match="Rule has no `matrix` method: a rule must return its mixing matrix"):
        Rule(every_steps=1).matrix(context())


def test_a_rule_knows_when_it_was_due_before() -> None:
    rule = Push(alpha=0.9, every_steps=10, start=15)
    assert [rule.previous(step) for step in (15, 20, 30, 31)] == [0, 0, 20, 30]
    assert Independent().previous(50) == 0


@pytest.mark.parametrize("every_steps", [1, 3, 10, 25, 40])
def test_a_slower_cadence_is_met_by_the_first_averaging_at_or_after_each_multiple(every_steps: int) -> None:
    rule = Push(alpha=0.9, every_steps=10)
    due = [step for step in range(1, 201) if rule.is_due(step)]
    found = [
        step
        for step in due
        if AveragingContext(step=step, size=2, lr_ratio=1.0, previous=rule.previous(step)).is_first_since(every_steps)
    ]
    multiples = range(every_steps, 201, every_steps)
    assert found == sorted({min(step for step in due if step >= multiple) for multiple in multiples})
