from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from helpers import assert_same_bits, averaged_tensors, make_networks, snapshot
from papa.core import mixing
from papa.core.averager import Averager
from papa.core.population import Population
from papa.core.rules import AveragingContext, MergeAll, Push
from papa.errors import MixingError
from papa.lab.selection import MergeElite, MergeGreedy, MergeTournament, Mutation


def context(step: int = 10, size: int = 5) -> AveragingContext:
    return AveragingContext(step=step, size=size, lr_ratio=1.0)


class TestFitness:
    def test_parents_are_drawn_in_proportion_to_one_over_their_loss(self) -> None:
        chances = mixing.fitness([1.0, 2.0, 4.0])
        assert torch.allclose(chances, torch.tensor([4.0, 2.0, 1.0]).double() / 7)

    def test_a_loss_that_is_not_finite_is_never_drawn(self) -> None:
        assert mixing.fitness([1.0, math.nan, math.inf, 1.0]).tolist() == [0.5, 0.0, 0.0, 0.5]

    def test_with_fewer_than_two_finite_losses_all_are_equal(self) -> None:
        assert mixing.fitness([1.0, math.nan]).tolist() == [0.5, 0.5]


class TestMergeGreedy:
    def test_every_member_becomes_the_mean_of_the_chosen(self) -> None:
        population = Population(make_networks("linear", 4))
        members = [{name: tensor.clone() for name, tensor in its.items()} for its in averaged_tensors(population)]
        Averager(population, MergeGreedy(lambda: (2, 0), every_steps=1)).step()
        for tensors in averaged_tensors(population):
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, (members[0][name] + members[2][name]) / 2)

    @pytest.mark.parametrize("chosen", [[], [4], [-1]])
    def test_unknown_members_are_refused(self, chosen: list[int]) -> None:
        with pytest.raises(MixingError, match="expected at least one of 0 to 3"):
            MergeGreedy(lambda: chosen, every_steps=1).matrix(context(size=4))


class TestMergeTournament:
    def test_pairs_follow_their_chances(self) -> None:
        losses = [1.0, 2.0, 4.0]
        chances = [4 / 7, 2 / 7, 1 / 7]
        found: collections.Counter[tuple[int, ...]] = collections.Counter()
        for step in range(1, 2001):
            for row in MergeTournament(lambda: losses, seed=1, every_steps=1).matrix(context(step, size=3)):
                found[tuple(row.nonzero().flatten().tolist())] += 1
        pairs = [(0, 1), (0, 2), (1, 2)]
        expected = [
            6000 * (chances[a] * chances[b] / (1 - chances[a]) + chances[b] * chances[a] / (1 - chances[b]))
            for a, b in pairs
        ]
        assert scipy.stats.chisquare([found[pair] for pair in pairs], expected).pvalue > 0.001

    def test_it_is_a_function_of_seed_step_and_losses(self) -> None:
        rule = MergeTournament(lambda: [1.0, 2.0, 3.0, 4.0, 5.0], seed=3, every_steps=1)
        assert torch.equal(rule.matrix(context(10)), rule.matrix(context(10)))
        assert not torch.equal(rule.matrix(context(10)), rule.matrix(context(20)))


class FakeScorer:
    """Gives each candidate a loss that depends on its row and number, and records the survivors."""

    def __init__(self, size: int, parent_loss: float = 0.5, *, children_per_member: int = 6) -> None:
        self.size, self.parent_loss, self.num_children = size, parent_loss, children_per_member * size
        self.losses: dict[int, float] = {}
        self.survivors: list[int] = []

    def __call__(self, rows: Tensor, candidates: range) -> list[float]:
        assert rows.shape == (len(candidates), self.size)
        for row, candidate in zip(rows, candidates, strict=True):
            is_parent = candidate >= self.num_children
            assert (int((row != 0).sum()) == 1) == is_parent
            self.losses[candidate] = self.parent_loss + 0.001 * candidate if is_parent else 1 / (1 + candidate)
        return [self.losses[candidate] for candidate in candidates]

    def on_survivors(self, children: Sequence[int | None]) -> None:
        self.survivors = [
            self.num_children + member if child is None else child for member, child in enumerate(children)
        ]


class TestMergeElite:
    @pytest.mark.parametrize("size", [2, 3, 5, 10])
    @pytest.mark.parametrize("parent_loss", [0.0, 0.05, 10.0])
    @pytest.mark.parametrize("children_per_member", [6, 2])
    def test_the_best_survive_and_the_others_are_drawn_from_the_rest(
        self, size: int, parent_loss: float, children_per_member: int
    ) -> None:
        scorer = FakeScorer(size, parent_loss, children_per_member=children_per_member)
        rule = MergeElite(scorer, scorer.on_survivors, children_per_member=children_per_member, seed=1, every_steps=1)
        matrix = rule.matrix(context(size=size))
        assert len(scorer.losses) == (children_per_member + 1) * size
        best = sorted(scorer.losses, key=scorer.losses.__getitem__)[: round(0.6 * size)]
        assert set(best) <= set(scorer.survivors)
        assert len(set(scorer.survivors)) == size
        for member, (candidate, row) in enumerate(zip(scorer.survivors, matrix, strict=True)):
            if candidate >= scorer.num_children:  # a parent keeps its place
                assert torch.equal(row, mixing.identity(size)[member])
            else:
                assert sorted(row.tolist())[-2:] == [0.5, 0.5]

    def test_the_other_survivors_are_drawn_uniformly(self) -> None:
        found: collections.Counter[int] = collections.Counter()
        for step in range(1, 801):
            scorer = FakeScorer(5)
            MergeElite(scorer, scorer.on_survivors, seed=1, every_steps=1).matrix(context(step))
            best = sorted(scorer.losses, key=scorer.losses.__getitem__)[:3]
            found.update(set(scorer.survivors) - set(best))
        assert len(found) == 32
        assert scipy.stats.chisquare([found[candidate] for candidate in found]).pvalue > 0.001

    def test_a_loss_of_nan_is_the_worst(self) -> None:
        def losses(rows: Tensor, candidates: range) -> list[float]:
            return [math.nan if candidate else 1.0 for candidate in candidates]

        chosen: list[int | None] = []
        MergeElite(losses, chosen.extend, elite=0.2, every_steps=1).matrix(context())
        assert 0 in chosen


class TestMutation:
    def test_its_size_falls_with_the_generation(self) -> None:
        population = Population(make_networks("conv_batch_norm", 3))
        averager = Averager(population, MergeAll(every_steps=1), merge_hooks=Mutation(seed=1))
        for generation in (1, 2, 3):
            before = population.combined([1 / 3] * 3)
            averager.step()
            noise = [
                (parameter.detach() - before[name]).flatten()
                for model in population
                for name, parameter in model.named_parameters()
            ]
            spread = torch.cat(noise).std().item()
            assert spread == pytest.approx(0.01 / generation, rel=0.1)

    def test_buffers_are_left_alone(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        before = [{name: buffer.clone() for name, buffer in model.named_buffers()} for model in population]
        mutation = Mutation(seed=1)
        for index, model in enumerate(population):
            mutation.mutate_(model, index, step=1, generation=1)
            assert_same_bits(dict(model.named_buffers()), before[index])

    def test_it_is_a_function_of_seed_step_and_key(self) -> None:
        def mutated(seed: int, key: int, step: int) -> dict[str, Tensor]:
            (network,) = make_networks("linear", 1)
            Mutation(seed=seed).mutate_(network, key, step=step, generation=1)
            return snapshot(network)

        first = mutated(1, 2, 3)
        assert_same_bits(first, mutated(1, 2, 3))
        for other in (mutated(2, 2, 3), mutated(1, 3, 3), mutated(1, 2, 4)):
            assert any(not torch.equal(first[name], other[name]) for name in first)

    def test_a_key_of_none_means_no_noise(self) -> None:
        population = Population(make_networks("linear", 3))
        mutation = Mutation(seed=1)
        mutation.keys = {0: None, 1: 7, 2: 7}
        Averager(population, MergeAll(every_steps=1), merge_hooks=mutation).step()
        mean, one, other = averaged_tensors(population)
        assert_same_bits(one, other)
        assert any(not torch.equal(mean[name], one[name]) for name in mean)
        assert mutation.keys == {}

    @pytest.mark.parametrize(("push_steps", "steps"), [(1, [5, 10, 15]), (2, [6, 10, 16]), (3, [6, 12, 15])])
    def test_with_a_push_it_has_its_own_cadence(self, push_steps: int, steps: list[int]) -> None:
        """Every 5 steps, or at the first push after that where 5 is no multiple of the push's own cadence."""
        population, spreads, changed = Population([nn.Linear(64, 64) for _ in range(2)]), [], []
        rule, mutation = Push(alpha=1.0, every_steps=push_steps), Mutation(seed=1, every_steps=5)
        averager = Averager(population, rule, merge_hooks=mutation)
        for step in range(1, 17):
            before = population.matrix.clone()
            averager.step()
            if not torch.equal(before, population.matrix):
                changed.append(step)
                spreads.append(float((population.matrix - before).std()))
        assert changed == steps
        first = spreads[0]
        assert [round(first / spread) for spread in spreads] == [1, 2, 3]  # scale/g
