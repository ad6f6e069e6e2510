"""The table a reader wants: members' mean [min, max], ensemble, average soup, greedy soup."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from papa.lab.report.fields import number, part
from papa.lab.report.groups import groups_of

PAPER_ROW = "paper's test, in its full setting"
COLUMNS = ("mean [min, max]", "ensemble", "average soup", "greedy soup")
NOT_FINISHED = ("not finished", "", "", "")
KEYS = {
    "mean": "mean of members",
    "ensemble": "ensemble",
    "average_soup": "average soup",
    "greedy_soup": "greedy soup",
}
"""What stands under each of `COLUMNS` in a result, and its name in words."""
REMARKS = {
    "mean": "each network on its own",
    "ensemble": "all networks at once",
    "average_soup": "one network, the mean of all",
    "greedy_soup": "one network, the mean of some",
}
"""What each of `KEYS` is."""
SOUPS = {"repaired": "repaired", "aligned": "aligned and repaired"}
"""Other soups of independent members: their key in a result, and what they are."""


def cells_of(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """One run's cells under `COLUMNS`, from the `test` or `validation` part of its result."""
    mean, *rest = (_number(scores, key) for key in KEYS)
    low, high = _number(scores, "min"), _number(scores, "max")
    return (f"{mean} [{low}, {high}]" if low and high else mean, *rest)


def paper_cells(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """The paper's cells under `COLUMNS`; empty where it gives no number."""
    return tuple("" if number(scores.get(key)) is None else f"{scores[key]:.2f}" for key in KEYS)


def run_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of one run: its name and, under `COLUMNS`, test and validation, its other soups, the paper's test."""
    rows: list[tuple[str, ...]] = []
    for name in ("test", "validation"):
        if isinstance(result.get(name), Mapping):
            rows.append((name, *cells_of(result[name])))
    for kind in SOUPS:
        for name in ("test", "validation"):
            if isinstance(scores := part(result, kind, name), Mapping):
                rows.append((of_soups(name, kind), *paper_cells(scores)))
    if isinstance(paper := result.get("paper"), Mapping):
        rows.append((of_soups(PAPER_ROW, result.get("paper_soups")), *paper_cells(paper)))
    return rows


def of_soups(name: str, kind: Any) -> str:
    """The name of a row whose soups are of another kind than plain."""
    return f"{name}, {SOUPS[kind]}" if isinstance(kind, str) and kind in SOUPS else name


def paper_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The paper's rows for the methods of some runs, where it has any."""
    firsts = {label: runs[0][1] for label, runs in groups_of(results).items()}
    return [
        (of_soups(f"paper's {label}", first.get("paper_soups")), *paper_cells(paper))
        for label, first in firsts.items()
        if isinstance(paper := first.get("paper"), Mapping)
    ]


def compare_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per method, in order of appearance: its name and, under `COLUMNS`, means over its runs.

    With several seeds each cell is `mean (standard deviation)` over the runs; the range in the first column is over
    all members of all runs. Runs of one method that differ in more than the seed get a row each; runs that have not
    finished count for nothing.
    """
    rows = []
    for label, group in groups_of(results).items():
        runs = [scores for _, result in group if (scores := scores_of(result))]
        if len(runs) <= 1:
            rows.append((label, *(cells_of(runs[0]) if runs else NOT_FINISHED)))
        else:
            mean, *rest = (_mean_and_deviation([number(run.get(key)) for run in runs]) for key in KEYS)
            lows, highs = ([v for run in runs if (v := number(run.get(key))) is not None] for key in ("min", "max"))
            spread = f" [{min(lows):.2f}, {max(highs):.2f}]" if lows and highs else ""
            rows.append((label, mean + spread, *rest))
        rows += _rows_of_soups(label, [result for _, result in group])
    return rows


def _rows_of_soups(label: str, results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each other kind of soups that all of some runs have."""
    rows: list[tuple[str, ...]] = []
    for kind in SOUPS:
        made = [result[kind] for result in results if isinstance(result.get(kind), Mapping)]
        if made and len(made) == len(results):
            cells = (_mean_of([scores_of(one).get(key) for one in made]) for key in ("average_soup", "greedy_soup"))
            rows.append((of_soups(label, kind), "", "", *cells))
    return rows


def compare_rows_with_paper(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `compare_rows`, each followed by the paper's for the same method and soups where it has one."""
    papers = {row[0]: row for row in paper_rows(results)}
    ours = compare_rows(results)
    beside = [row for own in ours for row in (own, papers.pop(f"paper's {own[0]}", None)) if row is not None]
    return [*beside, *papers.values()]


def details_table(results: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of what else the metric tells, such as the F1 of each class; no rows where it tells nothing.

    One row per method for its members' mean, their ensemble and the soups, means over its runs; each followed by the
    paper's, in its full setting, where it tells the same.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for label, group in groups_of(results).items():
        for key in KEYS:
            details = [part(scores_of(result), "details", key) for _, result in group]
            if told := [one for one in details if isinstance(one, Mapping)]:
                name = f"{label}: {key.replace('_', ' ')}"
                found[name] = told
                if isinstance(paper := part(group[0][1], "paper_details", key), Mapping):
                    soups = part(group[0][1], "paper_soups") if key.endswith("_soup") else None
                    found[of_soups(f"paper's {name}", soups)] = [paper]
    names = list(dict.fromkeys(name for told in found.values() for one in told for name in one))
    rows = [
        (label, *(_mean_of([one[name] for one in told if name in one]) for name in names))
        for label, told in found.items()
    ]
    return ("", *map(str, names)), rows


def scores_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result's test scores, or its validation scores where there was no test data."""
    for name in ("test", "validation"):
        if isinstance(scores := result.get(name), Mapping):
            return scores
    return {}


def _number(scores: Mapping[str, Any], key: str) -> str:
    if key not in scores:
        return ""
    value = number(scores[key])
    return "not finite" if value is None else f"{value:.2f}"


def _mean_of(values: Sequence[Any]) -> str:
    found = [number(value) for value in values]
    return _mean_and_deviation(found) if len(found) > 1 else "" if not found else _number({"": found[0]}, "")


def _mean_and_deviation(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return "not finite"
    return f"{statistics.mean(found):.2f} ({statistics.stdev(found):.2f})"
