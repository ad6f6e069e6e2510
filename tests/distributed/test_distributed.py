"""Processes that hold only the rows of their own members against one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distributed_jobs
import group_jobs
from papa.core.group import balanced_ranges
from papa.core.product import column_blocks
from papa.distributed.start import start_workers

SIZE = distributed_jobs.SIZE


@pytest.fixture(scope="module")
def local() -> dict[str, Any]:
    return distributed_jobs.run_local()


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def distributed(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = start_workers(distributed_jobs.run_distributed, request.param, SIZE)
    return found | {"num_ranks": request.param}


def test_every_operation_has_the_bits_of_one_process(local: dict[str, Any], distributed: dict[str, Any]) -> None:
    found = distributed["operations"]
    assert len(local["operations"]) > 150
    for name, expected in local["operations"].items():
        assert found[name] == expected, name


def test_uneven_numbers_of_members_have_the_bits_of_one_process(
    local: dict[str, Any], distributed: dict[str, Any]
) -> None:
    uneven = {
        name.removeprefix("uneven "): value for name, value in distributed["operations"].items() if "uneven" in name
    }
    assert bool(uneven) == (distributed["num_ranks"] == 2)
    for name, value in uneven.items():
        assert value == local["operations"][name], name


def test_every_rule_and_soup_has_the_bits_of_one_process(local: dict[str, Any], distributed: dict[str, Any]) -> None:
    for key, expected in local["rules"].items():
        assert group_jobs.identical(expected, distributed["rules"][key]), key


def test_repair_alignment_soups_and_ensemble_have_the_bits_of_one_process(
    local: dict[str, Any], distributed: dict[str, Any]
) -> None:
    for key, expected in local["aligned"].items():
        assert group_jobs.identical(expected, distributed["aligned"][key]), key


@pytest.mark.parametrize("rule", ["independent", "merged"])
def test_a_training_its_soups_scores_and_analysis_have_the_bits_of_one_process(
    local: dict[str, Any], distributed: dict[str, Any], rule: str
) -> None:
    expected, found = local["training"][rule], distributed["training"][rule]
    assert expected["similarity"]["matched"]
    assert (expected["aligned"] is not None) == (rule == "independent")
    for key, value in expected.items():
        assert group_jobs.identical(value, found[key]), key
    assert all(found["unchanged"]), "the results changed the members"


def test_a_nonfinite_member_raises_on_all_ranks(local: dict[str, Any], distributed: dict[str, Any]) -> None:
    assert distributed["nonfinite errors"] == local["nonfinite errors"]
    messages = distributed["nonfinite errors"].values()
    assert all(f"{SIZE - 1} has" in message for message in messages), messages


@pytest.mark.parametrize(("exchange", "tolerance"), [("exact", 0.0), ("fast", 1e-6)])
def test_sums_over_processes_are_close(
    local: dict[str, Any], distributed: dict[str, Any], exchange: str, tolerance: float
) -> None:
    expected, found = local["pushes"], distributed["pushes"][exchange]
    for key in ("pushed", "merged"):
        for one, other in zip(expected[key], found[key], strict=True):
            assert (one - other).abs().max() <= tolerance * 100
    assert all(torch.equal(found["merged"][0], weight) for weight in found["merged"]), "ranks have different means"


def test_bytes_sent_are_counted(distributed: dict[str, Any]) -> None:
    exact, fast = (distributed["pushes"][exchange]["bytes"] for exchange in ("exact", "fast"))
    num_ranks, columns = distributed["num_ranks"], 60_200
    assert fast == pytest.approx(2 * 4 * columns * (num_ranks - 1) / num_ranks, rel=0.01)
    own = len(balanced_ranges(SIZE, num_ranks)[0])
    widths = [block.shape[1] for block in column_blocks(torch.empty(SIZE, columns))]
    mixed = sum(widths[block] for block in balanced_ranges(len(widths), num_ranks)[0])
    # Rank 0 sends back the rows of others in the blocks that it mixes, and its own rows of the other blocks.
    assert exact == pytest.approx(4 * (mixed * (SIZE - own) + (columns - mixed) * own), rel=0.01)


def test_the_all_reduce_of_half_precision_sends_float32(distributed: dict[str, Any]) -> None:
    num_ranks = distributed["num_ranks"]
    assert distributed["half precision"] == pytest.approx(2 * 4 * 60_200 * (num_ranks - 1) / num_ranks, rel=0.01)


def test_errors_name_the_rank_and_both_values(distributed: dict[str, Any]) -> None:
    messages = distributed["mismatch errors"]
    assert "rank 1 has torch.float32 of shape (2, 4) as 'weight', rank 0 has" in messages["architecture"]
    assert "rank 1 has two.weight as 'tensor 0', rank 0 has one.weight: all" in messages["order"]
    assert "rank 1 has torch.float32 of shape (3, 2, 2, 2) with strides (8, 1, 4, 2) as 'weight'" in messages["memory"]
    assert "rank 1 has fast as 'exchange', rank 0 has exact: give every process the same" in messages["exchanges"]
    assert (
        "rank 1 has 0.8 as 'alpha', rank 0 has 0.9: give every process the same rule and options" in messages["alpha"]
    )
    assert "rank 1 has 11 as 'every_steps', rank 0 has 10" in messages["cadence"]
    assert "rank 1 has 101 as 'num_steps', rank 0 has 100" in messages["steps"]
    found = [message for name, message in messages.items() if name.startswith("learning rate")]
    assert len(found) == 2
    assert all("processes are at 0.75 to 1 of their highest learning rates: a push" in message for message in found)
    expected = f"ConfigError: there are {distributed['num_ranks']} ranks for 1 members: start at most one for each"
    assert messages["too many"].startswith(expected)
    assert "exchange is quick: known: exact, fast" in messages["exchange"]
