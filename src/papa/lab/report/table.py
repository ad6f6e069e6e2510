"""Tables of scores: members' mean [min, max], ensemble, average soup, greedy soup."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from papa.lab.report.fields import number, part, plain
from papa.lab.report.metric import metric_of
from papa.lab.report.settings import runs_by_setting

PAPER_ROW = "paper's test, in its full setting"
COLUMNS = ("mean [min, max]", "ensemble", "average soup", "greedy soup")
NOT_FINISHED = ("not finished", "", "", "")
KEYS = {
    "mean": "mean of members",
    "ensemble": "ensemble",
    "average_soup": "average soup",
    "greedy_soup": "greedy soup",
}
"""The key in a result and the name of each of `COLUMNS`."""
REMARKS = {
    "mean": "each network alone",
    "ensemble": "all networks together",
    "average_soup": "one network, the average of all",
    "greedy_soup": "one network, the average of some",
}
"""What each of `KEYS` means."""
SOUPS = {"repaired": "repaired", "aligned": "aligned and repaired"}
"""Other soups of independent members: their key in a result, and their name."""


def scores_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The test scores of a result, or its validation scores if it has no test data."""
    for name in ("test", "validation"):
        if isinstance(scores := result.get(name), Mapping):
            return scores
    return {}


def cells_of(scores: Mapping[str, Any], digits: int = 2) -> tuple[str, ...]:
    """The cells of one run under `COLUMNS`, from its test or validation scores."""
    mean, *rest = (_cell(scores, key, digits) for key in KEYS)
    low, high = _cell(scores, "min", digits), _cell(scores, "max", digits)
    return (f"{mean} [{low}, {high}]" if low and high else mean, *rest)


def paper_cells(scores: Mapping[str, Any], digits: int = 2) -> tuple[str, ...]:
    """The paper's cells under `COLUMNS`; empty if it gives no number."""
    return tuple("" if number(scores.get(key)) is None else f"{scores[key]:.{digits}f}" for key in KEYS)


def run_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of one run, named and under `COLUMNS`: test, validation, its other soups, the paper's test."""
    rows: list[tuple[str, ...]] = []
    digits = metric_of([result]).digits
    for name in ("test", "validation"):
        if isinstance(result.get(name), Mapping):
            rows.append((name, *cells_of(result[name], digits)))
    for kind in SOUPS:
        for name in ("test", "validation"):
            if isinstance(scores := part(result, kind, name), Mapping):
                rows.append((with_soups(name, kind), *paper_cells(scores, digits)))
    rows += _best_soup_rows(result.get("best_soup"), digits)
    if isinstance(paper := result.get("paper"), Mapping):
        rows.append((with_soups(PAPER_ROW, result.get("paper_soups")), *paper_cells(paper)))
    return rows


def _best_soup_rows(best: Any, digits: int) -> list[tuple[str, ...]]:
    """The average soup of the epoch at which it was best on validation data."""
    rows: list[tuple[str, ...]] = []
    for name in ("test", "validation"):
        found = part(best, name)
        score = next((v for key in ("average_soup", "score") if (v := number(part(found, key))) is not None), None)
        if score is not None:
            label = f"{name}, best average soup (epoch {plain(part(best, 'epoch'))})"
            rows.append((label, "", "", f"{score:.{digits}f}", ""))
    return rows


def with_soups(name: str, kind: Any) -> str:
    """The name of a row, with the kind of its soups if they are not plain averages."""
    return f"{name}, {SOUPS[kind]}" if isinstance(kind, str) and kind in SOUPS else name


def paper_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The paper's rows for the methods of some runs, as far as it has them."""
    firsts = {label: runs[0][1] for label, runs in runs_by_setting(results).items()}
    return [
        (with_soups(f"paper's {label}", first.get("paper_soups")), *paper_cells(paper))
        for label, first in firsts.items()
        if isinstance(paper := first.get("paper"), Mapping)
    ]


def compare_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per method, in order of appearance: its name and, under `COLUMNS`, means over its runs.

    With several seeds each cell is `mean (standard deviation)` over runs; the range in the first column is over all
    members of all runs. Runs of one method that differ in more than the seed get separate rows. Unfinished runs are
    left out of the means.
    """
    rows, digits = [], metric_of(results).digits
    for label, group in runs_by_setting(results).items():
        runs = [scores for _, result in group if (scores := scores_of(result))]
        if len(runs) <= 1:
            rows.append((label, *(cells_of(runs[0], digits) if runs else NOT_FINISHED)))
        else:
            mean, *rest = (_mean_and_deviation([number(run.get(key)) for run in runs], digits) for key in KEYS)
            lows, highs = ([v for run in runs if (v := number(run.get(key))) is not None] for key in ("min", "max"))
            spread = f" [{min(lows):.{digits}f}, {max(highs):.{digits}f}]" if lows and highs else ""
            rows.append((label, mean + spread, *rest))
        rows += _soup_rows(label, [result for _, result in group], digits)
    return rows


def _soup_rows(label: str, results: Sequence[Mapping[str, Any]], digits: int) -> list[tuple[str, ...]]:
    """One row for each other kind of soup that all of some runs have."""
    rows: list[tuple[str, ...]] = []
    for kind in SOUPS:
        found = [result[kind] for result in results if isinstance(result.get(kind), Mapping)]
        if found and len(found) == len(results):
            keys = ("average_soup", "greedy_soup")
            cells = (_mean_of([scores_of(one).get(key) for one in found], digits) for key in keys)
            rows.append((with_soups(label, kind), "", "", *cells))
    return rows


def compare_rows_with_paper(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `compare_rows`, each followed by the paper's for the same method and soups, if it has one."""
    papers = {row[0]: row for row in paper_rows(results)}
    ours = compare_rows(results)
    paired = [row for own in ours for row in (own, papers.pop(f"paper's {own[0]}", None)) if row is not None]
    return [*paired, *papers.values()]


def details_table(results: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the metric's details, such as the F1 of each class; no rows if it has none.

    One row per method for its members' mean, their ensemble and the soups, means over its runs; each followed by the
    paper's, in its full setting, if it gives the same.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for label, group in runs_by_setting(results).items():
        for key in KEYS:
            details = [part(scores_of(result), "details", key) for _, result in group]
            if given := [one for one in details if isinstance(one, Mapping)]:
                name = f"{label}: {key.replace('_', ' ')}"
                found[name] = given
                if isinstance(paper := part(group[0][1], "paper_details", key), Mapping):
                    soups = part(group[0][1], "paper_soups") if key.endswith("_soup") else None
                    found[with_soups(f"paper's {name}", soups)] = [paper]
    digits = metric_of(results).digits
    names = list(dict.fromkeys(name for given in found.values() for one in given for name in one))
    rows = [
        (label, *(_mean_of([one[name] for one in given if name in one], digits) for name in names))
        for label, given in found.items()
    ]
    return ("", *map(str, names)), rows


def _cell(scores: Mapping[str, Any], key: str, digits: int) -> str:
    if key not in scores:
        return ""
    value = number(scores[key])
    return "not finite" if value is None else f"{value:.{digits}f}"


def _mean_of(values: Sequence[Any], digits: int) -> str:
    found = [number(value) for value in values]
    if len(found) > 1:
        return _mean_and_deviation(found, digits)
    return "" if not found else _cell({"": found[0]}, "", digits)


def _mean_and_deviation(values: Sequence[float | None], digits: int) -> str:
    found = [value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return "not finite"
    return f"{statistics.mean(found):.{digits}f} ({statistics.stdev(found):.{digits}f})"
