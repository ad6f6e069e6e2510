import math
from dataclasses import replace

import pytest
import torch

from helpers import assert_same_bits, small_training
from papa import Independent, MergeAll, MergeMany, MergePairs, Push, Rule
from papa.couplings.adaptive import AdaptivePush
from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.couplings.sparse import Shuffle, SparseAverage
from papa.couplings.weighted import GradientWeightedPush, PushPull
from papa.lab.augment.policy import DART_POLICIES, GRIDS, draw_policies
from papa.lab.config import METHODS, AverageConfig, Config, DiversityConfig, idle_options
from papa.lab.domains.images import policies_for
from papa.lab.models import make_model
from papa.lab.probes import MergeProbes
from papa.lab.recipes import RECIPES, find, paper_soups
from papa.lab.recipes.build import (
    align_for,
    build,
    callbacks_for,
    make_schedule,
    repair_for,
    trajectory_averages_for,
)
from papa.lab.recipes.rules import rule_for
from papa.lab.selection import CandidateScorer, MergeElite, MergeGreedy, MergeTournament
from papa.repair import repair_plan
from papa.training import Align, AveragingOptions, Length, Repair, TrajectoryAverage

LENGTH = Length(num_steps=3000, steps_per_epoch=100)


def test_every_method_has_its_rule() -> None:
    scorer = CandidateScorer(small_training())
    kinds = {method: type(rule_for(Config(method=method), LENGTH, scorer)) for method in METHODS}
    assert kinds == {
        "independent": Independent,
        "longer": Independent,
        "larger-batches": Independent,
        "papa": Push,
        "papa-all": MergeAll,
        "papa-2": MergePairs,
        "pair-75": MergePairs,
        "many-half": MergeMany,
        "many-75": MergeMany,
        "greedy-merge": MergeGreedy,
        "sparta": SparseAverage,
        "wash": Shuffle,
        "easgd": Elastic,
        "lookahead": Lookahead,
        "diloco": OuterStep,
        "noloco": Gossip,
        "dppf": PushPull,
        "grawa": GradientWeightedPush,
        "papa-auto": AdaptivePush,
    }


def test_selection_has_its_rules() -> None:
    scorer = CandidateScorer(small_training())

    def rule(**changes: bool) -> Rule:
        average = AverageConfig(every_epochs=2.0, start=3.0, **changes)
        return rule_for(Config(method="papa-2", average=average), LENGTH, scorer)

    tournament, elite = rule(tournament=True), rule(tournament=True, elitist=True)
    assert isinstance(tournament, MergeTournament)
    assert isinstance(elite, MergeElite)
    assert elite.tournament
    assert not rule(elitist=True).tournament  # type: ignore[attr-defined]
    assert (elite.every_steps, elite.start) == (tournament.every_steps, tournament.start) == (200, 300)


def test_members_may_start_from_the_same_weights() -> None:
    config = replace(find("digits").config("smoke"), diversity=DiversityConfig(same_init=True))
    first, *others = build(config).population
    for other in others:
        assert_same_bits(other.state_dict(), first.state_dict())
    apart = build(replace(config, diversity=DiversityConfig())).population
    assert_same_bits(apart[0].state_dict(), first.state_dict())
    assert apart.distances().max() > 0


def test_darts_members_have_one_augmentation_each() -> None:
    policies = policies_for(Config(members=4, diversity=DiversityConfig(grid="dart")))
    assert [policy.description for policy in policies[:3]] == [policy.description for policy in DART_POLICIES]
    assert policies[3] == policies[0]


def test_swa_goes_to_a_rate_of_its_own() -> None:
    config = find("cifar100-resnet18-swa").config()
    schedule = make_schedule(config)
    at = {epoch: round(0.1 * schedule(epoch * 10, 4500), 6) for epoch in (0, 149, 150, 224, 240, 449)}
    assert at == {0: 0.1, 149: 0.1, 150: 0.01, 224: 0.01, 240: 0.05, 449: 0.05}
    (average,) = trajectory_averages_for(config)
    assert isinstance(average, TrajectoryAverage)
    assert average.start == 0.5
    assert trajectory_averages_for(Config()) == []


def test_epochs_become_steps_and_shares_become_half_lives() -> None:
    average = AverageConfig(half_life=0.02, every_steps=10, every_epochs=5, start=10, stop=20)
    merge = rule_for(Config(method="papa-all", average=average), LENGTH)
    assert (merge.every_steps, merge.start, merge.stop) == (500, 1000, 2000)
    push = rule_for(Config(average=average), LENGTH)
    assert isinstance(push, Push)
    assert math.isclose(push.half_life_in_steps, 60)
    with_alpha = rule_for(Config(average=replace(average, alpha=0.9, half_life=None)), LENGTH)
    assert isinstance(with_alpha, Push)
    assert with_alpha.effective_alpha == 0.9


def test_the_papers_push_is_the_papers() -> None:
    push = rule_for(find("cifar100-resnet18").config(), LENGTH)
    assert push == Push(alpha=0.99, every_steps=10)
    assert rule_for(find("cifar100-finetune-convit").config(), LENGTH) == Push(alpha=0.9995, every_steps=10)


def test_members_draw_their_policies_from_the_grid() -> None:
    config = find("digits").config()
    assert policies_for(config) == draw_policies(GRIDS["ablation"], 5, seed=1)
    assert len(set(policies_for(config))) == 5


@pytest.mark.parametrize("method", METHODS)
def test_digits_takes_steps_under_every_method(method: str) -> None:
    config = replace(find("digits").config("smoke"), method=method, members=2)
    training = build(config)
    training.run()
    assert training.step == training.length.num_steps


@pytest.mark.parametrize("method", ["independent", "papa", "papa-all", "papa-2"])
def test_what_a_method_does_not_look_at_changes_no_bit(method: str) -> None:
    smoke = find("digits").config("smoke")
    average = replace(smoke.average, alpha=0.5, half_life=None, align="activations", mutation=0.01)
    others = {
        "alpha": 0.9,
        "every_steps": 4,
        "scale_by_lr": False,
        "align_every_epochs": 0.5,
        "mutation_every_epochs": 0.5,
        "every_epochs": 0.5,
    }
    idle = idle_options(method)
    names = {option.removeprefix("average.") for option in idle} & set(others)
    assert len(names) == len(idle - {"average.half_life"})
    ends = []
    for changes in ({}, {name: others[name] for name in names}):
        training = build(replace(smoke, method=method, members=2, average=replace(average, **changes)))
        training.run()
        ends.append([network.state_dict() for network in training.population])
    for found, expected in zip(*ends, strict=True):
        assert_same_bits(found, expected)


def test_options_of_merging_reach_the_training() -> None:
    assert repair_for(Config()) is align_for(Config()) is None
    average = AverageConfig(
        repair=3,
        repair_policy="shared",
        repair_scope="batch-norm",
        align="sinkhorn",
        align_every_epochs=2.0,
        align_batches=3,
    )
    config = Config(average=average)
    assert repair_for(config) == Repair(num_batches=3, own_policies=False, scope="batch-norm")
    assert align_for(config) == Align(by="sinkhorn", every_epochs=2.0, num_batches=3)


def test_recipes_say_where_members_are_repaired() -> None:
    batches = {name: recipe.config().average.repair for name, recipe in RECIPES.items()}
    for name, number in batches.items():
        assert number == (
            0
            if name.startswith(("digits", "imagenet", "optdigits", "text", "breast-cancer", "wine", "table", "letters"))
            else 5
        ), name


@pytest.mark.parametrize("name", ["effnetv2s", "eva02", "convit"])
def test_fine_tuning_repairs_the_layers_before_activation_functions(name: str) -> None:
    config = find(f"cifar100-finetune-{name}").config("smoke")
    network = make_model(config.model.name, num_classes=10, image_size=112)
    batches = [torch.randn(2, 3, 112, 112)]
    found = repair_plan(network, batches, scope=AveragingOptions(repair=repair_for(config)).repaired_layers)
    assert found == repair_plan(network, batches, scope="activations")
    if name == "effnetv2s":
        assert found == repair_plan(network, batches)
    else:
        assert found.repaired == tuple(f"blocks.{block}.mlp.fc1" for block in range(12))


def test_the_papers_soups_of_independent_members_are_aligned_on_cifar_and_repaired_elsewhere() -> None:
    def soups(name: str, method: str) -> str | None:
        return paper_soups(replace(find(name).config(), method=method))

    assert soups("cifar100-vgg16", "independent") == soups("cifar10-resnet18", "independent") == "aligned"
    assert soups("cifar100-finetune-convit", "independent") == soups("imagenet-resnet50", "independent") == "repaired"
    assert soups("cifar100-vgg16", "papa-all") is soups("digits", "independent") is None
    assert find("cifar100-vgg16").config().average.align_soups


def test_probes_are_on_when_asked_for() -> None:
    assert callbacks_for(Config(), print) == []
    (callback,) = callbacks_for(Config(average=AverageConfig(probes=True, probe_steps=3)), print)
    assert isinstance(callback, MergeProbes)
    assert callback.steps_later == 3
