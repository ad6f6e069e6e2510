"""The cost model of `papa plan`, and its output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from papa.cli.main import main
from papa.core.group import balanced_ranges
from papa.errors import ConfigError
from papa.lab.costs import Plan, cost_of

PLAN = Plan(params=1e6, members=4, bandwidth=32e6, step_time=0.1, latency=0.0)


def test_costs_computed_by_hand() -> None:
    cost = cost_of(PLAN, "fast")
    assert cost.bytes_per_push == 6e6  # 2 x 4 MB x 3/4
    assert cost.bytes_per_step == 6e5
    assert cost.seconds_per_push == 1.5  # at 4 MB a second
    assert cost.time_lost == pytest.approx(1.5 / 2.5)
    assert cost.memory_bytes == 4e6


@pytest.mark.parametrize(("members", "ranks"), [(4, 1), (4, 2), (5, 4), (7, 3), (8, 8)])
def test_an_exact_push_costs_what_the_busiest_rank_sends(members: int, ranks: int) -> None:
    counts = [len(local) for local in balanced_ranges(members, ranks)]
    sent = [count * (ranks - 1) / ranks for count in counts]  # columns of its rows that others work on
    returned = [(members - count) / ranks for count in counts]  # columns of the others' rows that it works on
    cost = cost_of(replace(PLAN, members=members, ranks=ranks), "exact")
    assert cost.bytes_per_push == pytest.approx(4e6 * max(map(sum, zip(sent, returned, strict=True))))


def test_costs_of_exchanges_compared() -> None:
    assert cost_of(PLAN, "exact").bytes_per_push == cost_of(PLAN, "fast").bytes_per_push  # one member on each rank
    two = replace(PLAN, ranks=2)
    assert cost_of(two, "exact").bytes_per_push == 2 * cost_of(two, "fast").bytes_per_push
    assert cost_of(replace(PLAN, ranks=1), "exact").time_lost == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 5}, "--ranks is 5 for 4 members"),
        ({"bandwidth": 0.0}, "bandwidth is 0, expected a finite number above 0"),
        ({"params": float("inf")}, "params is inf, expected a finite number above 0"),
        ({"step_time": float("nan")}, "--step-time is nan, expected a finite number above 0"),
        ({"latency": -1.0}, "latency is -1, expected seconds, 0 or more"),
        ({"bytes_per_number": 0}, "--bytes-per-number is 0, expected a finite number above 0"),
        ({"members": 0}, "members is 0, expected a finite number above 0"),
        ({"every_steps": 0}, "--every-steps is 0, expected a finite number above 0"),
    ],
)
def test_values_out_of_range_raise(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost_of(replace(PLAN, **changes), "exact")  # type: ignore[arg-type]


def test_an_unknown_exchange_raises() -> None:
    with pytest.raises(ConfigError, match="exchange is exat: did you mean exact"):
        cost_of(PLAN, "exat")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--params", "11.7e6", "--members", "8", "--bandwidth", "1e9", "--step-time", "0.2"]
    assert main(["plan", *options]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("exact", "fast", "81.9 MB", "0.657", "time lost"))
    assert main(["plan", *options, "--ranks", "9"]) == 2
    assert "--ranks is 9 for 8 members" in capsys.readouterr().err
