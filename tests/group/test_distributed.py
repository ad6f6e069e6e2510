"""Processes that hold only their own members' rows, against one process, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import group_jobs
import spread_jobs
from papa.group import balanced_ranges, start_workers
from papa.lab.costs import Plan, cost_of

SIZE = spread_jobs.SIZE


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return spread_jobs.alone()


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def together(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = start_workers(spread_jobs.everything, request.param, SIZE)
    return found | {"num_ranks": request.param}


def test_every_operation_has_the_bits_of_one_process(alone: dict[str, Any], together: dict[str, Any]) -> None:
    found = together["operations"]
    assert len(alone["operations"]) > 150
    for name, expected in alone["operations"].items():
        assert found[name] == expected, name


def test_however_uneven_the_shares_are(alone: dict[str, Any], together: dict[str, Any]) -> None:
    uneven = {name.removeprefix("uneven "): value for name, value in together["operations"].items() if "uneven" in name}
    assert bool(uneven) == (together["num_ranks"] == 2)
    for name, value in uneven.items():
        assert value == alone["operations"][name], name


def test_every_rule_and_soup_has_the_bits_of_one_process(alone: dict[str, Any], together: dict[str, Any]) -> None:
    for key, expected in alone["march"].items():
        assert group_jobs.same(expected, together["march"][key]), key


def test_repair_alignment_soups_and_ensemble_have_the_bits_of_one_process(
    alone: dict[str, Any], together: dict[str, Any]
) -> None:
    for key, expected in alone["matched"].items():
        assert group_jobs.same(expected, together["matched"][key]), key


@pytest.mark.parametrize("rule", ["apart", "merged"])
def test_a_training_its_soups_scores_and_analysis_have_the_bits_of_one_process(
    alone: dict[str, Any], together: dict[str, Any], rule: str
) -> None:
    expected, found = alone["harvested"][rule], together["harvested"][rule]
    assert expected["similarity"]["matched"]
    assert (expected["aligned"] is not None) == (rule == "apart")
    for key, value in expected.items():
        assert group_jobs.same(value, found[key]), key
    assert all(found["unchanged"]), "looking at members changed them"


def test_a_member_that_cannot_be_looked_at_is_everyones_error(alone: dict[str, Any], together: dict[str, Any]) -> None:
    assert together["one sick"] == alone["one sick"]
    assert all(f"{SIZE - 1} has" in said for said in together["one sick"].values()), together["one sick"]


@pytest.mark.parametrize("how", ["delayed", "delayed, shared", "delayed, resumed"])
def test_a_delayed_push_has_the_bits_of_one_process(alone: dict[str, Any], together: dict[str, Any], how: str) -> None:
    assert [log is not None for log in together[how]["logs"]] == [step in (7, 12, 17) for step in range(1, 19)]
    for key, expected in alone["delayed"].items():
        assert group_jobs.same(expected, together[how][key]), key


def test_a_delayed_push_by_differences_goes_on_to_the_same_bits(together: dict[str, Any]) -> None:
    assert group_jobs.same(together["delayed, bfloat16"], together["delayed, bfloat16, resumed"])


@pytest.mark.parametrize(("exchange", "tolerance"), [("exact", 0.0), ("fast", 1e-6), ("bfloat16", 1e-4)])
def test_sums_over_processes_come_close(
    alone: dict[str, Any], together: dict[str, Any], exchange: str, tolerance: float
) -> None:
    expected, found = alone["fast"], together["fast"][exchange]
    for key in ("pushed", "merged"):
        for one, other in zip(expected[key], found[key], strict=True):
            assert (one - other).abs().max() <= tolerance * 100
    assert all(torch.equal(found["merged"][0], weight) for weight in found["merged"]), "ranks have different means"


@pytest.mark.parametrize("scale", spread_jobs.SCALES)
def test_bfloat16_means_are_off_by_a_share_of_how_far_members_moved_however_many_pushes(
    together: dict[str, Any], scale: float
) -> None:
    off = together["bfloat16"][scale]["off"]
    # Every rank rounds its part of the difference once and the sum is rounded once, each by 2^-9 of itself at most;
    # what float32 itself loses is relative to the weights.
    bound = 2 * 2**-9 + (together["num_ranks"] + 2) * 2**-24 * scale
    assert len(off) == 40
    assert max(off) <= bound * 1.01
    assert max(off[1:]) > 0.1 * 2**-9, "nothing was rounded"
    assert sum(off[-10:]) <= 2 * sum(off[1:11]), "rounding adds up"


def test_differences_go_on_from_the_mean_that_was_saved(together: dict[str, Any]) -> None:
    whole, resumed = together["fast"]["bfloat16"], together["fast"]["bfloat16, resumed"]
    assert group_jobs.same(whole, resumed)


def test_sums_send_less_and_halves_half_of_that(together: dict[str, Any]) -> None:
    exact, fast, halves = (together["fast"][exchange]["bytes"] for exchange in ("exact", "fast", "bfloat16"))
    num_ranks, columns = together["num_ranks"], 60_200
    assert fast == pytest.approx(2 * 4 * columns * (num_ranks - 1) / num_ranks, rel=0.01)
    assert halves == pytest.approx(fast / 2, rel=0.01)
    others = SIZE - len(balanced_ranges(SIZE, num_ranks)[0])
    assert exact == pytest.approx(4 * columns * others, rel=0.01)  # rank 0 mixes the only block, and hands it back


def test_the_cost_model_knows_how_half_precision_travels(together: dict[str, Any]) -> None:
    plan = Plan(params=60_200, members=together["num_ranks"], bandwidth=1.0, step_time=1.0, bytes_per_number=2)
    for exchange, found in together["half precision"].items():
        assert found == pytest.approx(cost_of(plan, exchange).bytes_per_push, rel=0.01), exchange


def test_a_number_that_was_not_finite_is_forgotten_with_the_weights(together: dict[str, Any]) -> None:
    mean = (together["num_ranks"] - 1) / 2
    first, poisoned, last = together["not finite"]
    assert (first, math.isfinite(poisoned), last) == (1.0, False, mean)


def test_errors_say_who_and_what(together: dict[str, Any]) -> None:
    names = together["names"]
    assert "rank 1 has torch.float32 of shape (2, 4) as 'weight', rank 0 has" in names["architecture"]
    assert "rank 1 has two.weight as 'tensor 0', rank 0 has one.weight: all" in names["order"]
    assert "rank 1 has torch.float32 of shape (3, 2, 2, 2) with strides (8, 1, 4, 2) as 'weight'" in names["memory"]
    assert "rank 1 has fast as 'exchange', rank 0 has exact: give every process the same" in names["exchanges"]
    assert "rank 1 has 0.8 as 'alpha', rank 0 has 0.9: give every process the same rule and options" in names["alpha"]
    assert "rank 1 has 11 as 'every_steps', rank 0 has 10" in names["cadence"]
    assert "rank 1 has 101 as 'num_steps', rank 0 has 100" in names["steps"]
    told = [message for name, message in names.items() if name.startswith("learning rate")]
    assert len(told) == 3
    assert all("processes are at 0.75 to 1 of their initial learning rates: a push" in message for message in told)
    expected = f"ConfigError: there are {together['num_ranks']} ranks for 1 members: start at most one for each"
    assert names["too many"].startswith(expected)
    assert "exchange is quick: known: exact, fast, bfloat16" in names["exchange"]
