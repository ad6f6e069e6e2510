"""The table a reader wants: members' mean [min, max], ensemble, average soup, greedy soup."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PAPER_ROW = "paper's test, in its full setting"
COLUMNS = ("mean [min, max]", "ensemble", "average soup", "greedy soup")


def cells_of(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """One run's cells under `COLUMNS`, from the `test` or `validation` part of its result."""
    mean, low, high = (_number(scores[key]) for key in ("mean", "min", "max"))
    return (f"{mean} [{low}, {high}]", *(_number(scores[key]) for key in ("ensemble", "average_soup", "greedy_soup")))


def paper_cells(scores: Mapping[str, float]) -> tuple[str, ...]:
    """The paper's cells under `COLUMNS`; empty where it gives no number."""
    keys = ("mean", "ensemble", "average_soup", "greedy_soup")
    return tuple(f"{scores[key]:.2f}" if key in scores else "" for key in keys)


def paper_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The paper's rows for the methods of some runs, where it has any."""
    scores = {result["method"]: result.get("paper") for result in results}
    return [(f"paper's {method}", *paper_cells(paper)) for method, paper in scores.items() if paper]


def compare_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per method, in order of appearance: its name and, under `COLUMNS`, means over its runs.

    With several seeds each cell is `mean (standard deviation)` over the runs; the range in the first column is over
    all members of all runs.
    """
    rows = []
    for method in dict.fromkeys(result["method"] for result in results):
        runs = [scores_of(result) for result in results if result["method"] == method]
        if len(runs) == 1:
            rows.append((method, *cells_of(runs[0])))
            continue
        low, high = min(run["min"] for run in runs), max(run["max"] for run in runs)
        keys = ("mean", "ensemble", "average_soup", "greedy_soup")
        mean, *rest = (_mean_and_deviation([run[key] for run in runs]) for key in keys)
        rows.append((method, f"{mean} [{_number(low)}, {_number(high)}]", *rest))
    return rows


def details_table(results: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of what else the metric tells, such as the F1 of each class; no rows where it tells nothing.

    One row per method for its members' mean, their ensemble and the soups, means over its runs.
    """
    rows = []
    names: tuple[str, ...] = ()
    for method in dict.fromkeys(result["method"] for result in results):
        runs = [scores_of(result).get("details") for result in results if result["method"] == method]
        for key in ("mean", "ensemble", "average_soup", "greedy_soup"):
            details = [run[key] for run in runs if run]
            if details:
                names = tuple(details[0])
                cells = (_mean_of([one[name] for one in details]) for name in names)
                rows.append((f"{method}: {key.replace('_', ' ')}", *cells))
    return ("", *names), rows


def scores_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result's test scores, or its validation scores where there was no test data."""
    scores: Mapping[str, Any] = result["test"] or result["validation"]
    return scores


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2f}"


def _mean_of(values: list[float]) -> str:
    return _number(values[0]) if len(values) == 1 else _mean_and_deviation(values)


def _mean_and_deviation(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({statistics.stdev(values):.2f})"
