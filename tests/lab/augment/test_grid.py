from __future__ import annotations

import pytest
from scipy import stats

from papa.lab.augment.policy import DART_POLICIES, GRIDS, Policy, draw_policies, draw_policy_per_batch
from papa.streams import stream

PLAIN, DEFAULT_GRID, IMAGENET_GRID, ABLATION_GRID, SEGMENTATION_GRID = GRIDS.values()


SIZES = {"none": 1, "default": 81, "imagenet": 16, "ablation": 9, "segmentation": 9}


def test_the_papers_grids():
    assert {name: len(grid) for name, grid in GRIDS.items()} == SIZES
    assert PLAIN.policies == (Policy(),)
    assert Policy(mixup=1.0, smoothing=0.05, cutmix=0.5, erasing=0.15) in DEFAULT_GRID.policies
    assert Policy(mixup=0.2, smoothing=0.1, cutmix=1.0, erasing=0.35) in IMAGENET_GRID.policies
    assert all(not policy.cutmix and not policy.erasing for policy in ABLATION_GRID.policies)
    assert {policy.mixup for policy in SEGMENTATION_GRID.policies} == {0.0, 0.2, 0.4}


def test_the_policies_of_dart():
    expected = (Policy(randaugment="rand-m4-n1-p1.0-mstd1.0"), Policy(cutmix=0.5), Policy(cutout=8))
    assert expected == DART_POLICIES


@pytest.mark.parametrize("grid", GRIDS.values())
def test_a_full_draw_is_the_whole_grid_once(grid):
    drawn = draw_policies(grid, len(grid), seed=1)
    assert set(drawn) == set(grid.policies)
    assert len(set(drawn)) == len(grid)


@pytest.mark.parametrize("grid", GRIDS.values())
def test_draws_start_over_when_members_outnumber_policies(grid):
    drawn = draw_policies(grid, 2 * len(grid) + 1, seed=1)
    once = draw_policies(grid, len(grid), seed=1)
    assert drawn == (*once, *once, once[0])


def test_a_members_policy_does_not_depend_on_the_number_of_members():
    many = draw_policies(DEFAULT_GRID, 100, seed=1)
    assert all(draw_policies(DEFAULT_GRID, size, seed=1) == many[:size] for size in (1, 3, 5, 10, 81, 82))


def test_seeds_determine_draws():
    assert draw_policies(DEFAULT_GRID, 10, seed=1) == draw_policies(DEFAULT_GRID, 10, seed=1)
    assert draw_policies(DEFAULT_GRID, 10, seed=1) != draw_policies(DEFAULT_GRID, 10, seed=2)


def test_every_policy_can_come_first():
    firsts = [ABLATION_GRID.policies.index(draw_policies(ABLATION_GRID, 1, seed=seed)[0]) for seed in range(900)]
    assert stats.chisquare([firsts.count(index) for index in range(9)]).pvalue > 0.01


def test_draws_per_batch_are_uniform_and_seeded():
    def draws(seed: int) -> list[int]:
        generator = stream(seed, "augment")
        return [ABLATION_GRID.policies.index(draw_policy_per_batch(ABLATION_GRID, generator)) for _ in range(1800)]

    counts = [draws(1).count(index) for index in range(9)]
    assert stats.chisquare(counts).pvalue > 0.01
    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
