"""What `papa plan` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from papa.cli.main import main
from papa.errors import ConfigError
from papa.group import balanced_ranges
from papa.lab.costs import Plan, cost_of

PLAN = Plan(num_parameters=1e6, num_members=4, num_ranks=4, bits_per_second=32e6, seconds_per_step=0.1, latency=0.0)


def test_by_hand() -> None:
    cost = cost_of(PLAN, "fast")
    assert cost.bytes_per_push == 6e6  # 2 x 4 MB x 3/4
    assert cost.bytes_per_step == 6e5
    assert cost.seconds_per_push == 1.5  # at 4 MB a second
    assert cost.share_lost == pytest.approx(1.5 / 2.5)
    assert cost.share_lost_delayed == pytest.approx(0.7 / 1.7)  # 8 of 10 steps hide 0.8 s of it
    assert cost.memory_bytes == 4e6
    assert cost.delayed_memory_bytes == 12e6


@pytest.mark.parametrize(("num_members", "num_ranks"), [(4, 1), (4, 2), (5, 4), (7, 3), (8, 8)])
def test_an_exact_push_costs_what_the_busiest_rank_sends(num_members: int, num_ranks: int) -> None:
    counts = [len(members) for members in balanced_ranges(num_members, num_ranks)]
    there = [count * (num_ranks - 1) / num_ranks for count in counts]  # its rows' columns that others work on
    back = [(num_members - count) / num_ranks for count in counts]  # the columns of others' rows that it works on
    cost = cost_of(replace(PLAN, num_members=num_members, num_ranks=num_ranks), "exact")
    assert cost.bytes_per_push == pytest.approx(4e6 * max(map(sum, zip(there, back, strict=True))))


def test_what_costs_more_and_what_less() -> None:
    assert cost_of(PLAN, "exact").bytes_per_push == cost_of(PLAN, "fast").bytes_per_push  # one member on each rank
    two = replace(PLAN, num_ranks=2)
    assert cost_of(two, "exact").bytes_per_push == 2 * cost_of(two, "fast").bytes_per_push
    assert cost_of(PLAN, "bfloat16").bytes_per_push == cost_of(PLAN, "fast").bytes_per_push / 2
    assert cost_of(replace(PLAN, num_ranks=1), "exact").share_lost == 0.0
    assert cost_of(replace(PLAN, seconds_per_step=10.0), "exact").share_lost_delayed == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 5}, "there are 5 ranks for 4 members"),
        ({"bits_per_second": 0.0}, "bandwidth: 0, expected a number of more than 0"),
        ({"num_parameters": float("inf")}, "network .params.: inf, expected a number of more than 0"),
        ({"seconds_per_step": float("nan")}, "step time: nan, expected a number of more than 0"),
        ({"latency": -1.0}, "latency: -1, expected seconds, 0 or more"),
        ({"bytes_per_number": 0}, "bytes per number: 0, expected at least 1"),
        ({"delay": 3}, "delay: 3, expected an even number below every steps, 10"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PLAN, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exchange is exat: did you mean exact"):
        cost_of(PLAN, "exat")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--params", "11.7e6", "--members", "8", "--bandwidth", "1e9", "--step-time", "0.2"]
    assert main(["plan", *options]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("exact", "fast", "bfloat16", "81.9 MB", "0.657", "time lost", "delay of 8"))
    assert main(["plan", *options, "--ranks", "9"]) == 2
    assert "there are 9 ranks for 8 members" in capsys.readouterr().err
