from __future__ import annotations

import copy

import pytest
import torch

from helpers import assert_same_bits, small_training, snapshot
from papa.core import layout, mixing
from papa.core.rules import Rule
from papa.core.soups import average_soup, greedy_soup
from papa.lab.selection import CandidateScorer, MergeElite, MergeGreedy, MergeTournament, Mutation
from papa.repair import repair_
from papa.training import Repair, Training


def trained(**changes: object) -> Training:
    training = small_training(num_epochs=1, rule=lambda training: MergeGreedy(lambda: [0], every_steps=100), **changes)
    training.run()
    return training


def test_losses_are_the_members_on_validation_data() -> None:
    training = trained()
    members, _ = training.evaluate_population(training.data.validation)
    assert CandidateScorer(training).losses() == [member.loss for member in members]


def test_greedy_members_are_those_of_the_greedy_soup() -> None:
    training = trained()
    soup = greedy_soup(training.population, lambda net: training.evaluate([net], training.data.validation)[0][0])
    assert CandidateScorer(training).greedy_members() == soup.members


@pytest.mark.parametrize("num_repair_batches", [0, 2])
def test_candidates_are_judged_as_the_networks_they_would_be(num_repair_batches: int) -> None:
    training = trained(repair=Repair(num_batches=num_repair_batches))
    rows = torch.cat([mixing.identity(3), mixing.merge_pairs(3, torch.Generator().manual_seed(1), num_children=4)])
    before = [snapshot(net) for net in training.population]
    found = CandidateScorer(training).candidate_losses(rows, range(len(rows)))
    for row, loss in zip(rows, found, strict=True):
        network = average_soup(training.population, row)
        if num_repair_batches and int((row != 0).sum()) > 1:
            repair_(network, list(training.population), training.batches.plain_repair(), row)
        assert loss == pytest.approx(training.evaluate([network], training.data.validation)[0][0].loss, rel=1e-5)
    for net, state in zip(training.population, before, strict=True):
        assert_same_bits(snapshot(net), state)


@pytest.mark.parametrize("children_per_member", [6, 2])
def test_members_get_the_noise_that_they_were_scored_with(children_per_member: int) -> None:
    judged: dict[int, torch.Tensor] = {}

    class Noting(CandidateScorer):
        def _make_child(self, tensors, row, candidate, statistics):  # type: ignore[no-untyped-def]
            network = super()._make_child(tensors, row, candidate, statistics)
            judged[candidate] = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
            return network

    chosen: list[int] = []
    mutation = Mutation(0.01, seed=1)

    def rule(training: Training) -> Rule:
        scorer = Noting(training, mutation)

        def survivors(candidates: object) -> None:
            chosen.extend(candidates)  # type: ignore[arg-type]
            scorer.survivors(candidates)  # type: ignore[arg-type]

        return MergeElite(
            scorer.candidate_losses, survivors, children_per_member=children_per_member, every_steps=4, seed=1
        )

    training = small_training(num_epochs=1, rule=rule, repair=None, merge_hooks=[mutation])
    before = copy.deepcopy(list(training.population))
    while training.averager.num_averagings == 0:
        before = copy.deepcopy(list(training.population))
        training._take_step()
    assert before
    for member, child in enumerate(chosen):
        candidate = child if child is not None else children_per_member * len(chosen) + member
        lived = torch.cat([parameter.detach().flatten() for parameter in training.population[member].parameters()])
        torch.testing.assert_close(lived, judged[candidate], rtol=1e-5, atol=1e-6)


def test_a_tournament_runs_to_the_end() -> None:
    training = small_training(rule=lambda training: MergeTournament(CandidateScorer(training).losses, every_steps=5))
    training.run()
    assert training.averager.num_averagings == 2
    tensors = [layout.named_tensors(net, training.population.averaged) for net in training.population]
    assert all(torch.isfinite(tensor).all() for named in tensors for tensor in named.values())
