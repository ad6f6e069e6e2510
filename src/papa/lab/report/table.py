"""Tables of scores: which runs can be averaged over, their means and soups, and how much of a gap a soup closes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from papa.lab.config import flat, idle_options
from papa.lab.report.metric import metric_of
from papa.lab.report.words import text

Settings: TypeAlias = dict[str, list[tuple[int, Mapping[str, Any]]]]
"""Runs with their index, by the label of their setting."""
Table: TypeAlias = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
"""Head and rows."""
NOT_COMPARED = ("recipe", "method", "seed", "device", "analysis", "data.root")
"""Options that do not change what is trained, or that the label already names."""


def runs_by_setting(results: Sequence[Mapping[str, Any]]) -> Settings:
    """Runs that differ only in the seed, with their index, under a label that names what sets them apart.

    Example:
        >>> runs = [{"recipe": "digits", "method": "papa", "config": {"members": p, "seed": 1}} for p in (3, 3, 5)]
        >>> [(label, len(group)) for label, group in runs_by_setting(runs).items()]
        [('papa, members 3', 2), ('papa, members 5', 1)]
    """
    configs = [dict(flat(result.get("config"))) for result in results]
    names = [(text(result.get("recipe")), text(result.get("method"))) for result in results]
    has_recipes = len({recipe for recipe, _ in names}) > 1
    settings: Settings = {}
    for index, (recipe, method) in enumerate(names):
        same_method = [configs[other] for other, name in enumerate(names) if name == (recipe, method)]
        ignored = {*NOT_COMPARED, *idle_options(method)}
        differences = [
            f"{key} {text(configs[index].get(key))}"
            for key in dict.fromkeys(key for config in same_method for key in config)
            if key not in ignored and any(config.get(key) != configs[index].get(key) for config in same_method)
        ]
        label = ", ".join([f"{recipe} {method}" if has_recipes else method, *differences])
        settings.setdefault(label, []).append((index, results[index]))
    return settings


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
    return result.get("test") or result.get("validation") or {}


def data_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Which data the scores of some runs are from: test, validation, or both."""
    kinds = ["test" if one.get("test") else "validation" for one in results if scores_of(one)]
    return " or ".join(dict.fromkeys(kinds)) or "test"


def is_independent(runs: Sequence[tuple[int, Mapping[str, Any]]]) -> bool:
    """Whether these runs of a setting have independent members."""
    return bool(runs[0][1].get("method") == "independent")


def other_soups(result: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The soups of one of `SOUPS`; empty if there are none, as for a single network, which is its own soup."""
    is_single = len(scores_of(result).get("members") or ()) == 1
    return {} if is_single else result.get(kind) or {}


def cells_of(scores: Mapping[str, Any], digits: int = 2) -> tuple[str, ...]:
    """The cells of one run under `COLUMNS`, from its test or validation scores; empty for what was not scored."""
    mean, *rest = (_cell([scores[key]], digits) if key in scores else "" for key in KEYS)
    low, high = (_cell([scores[key]], digits) if key in scores else "" for key in ("min", "max"))
    return (f"{mean} [{low}, {high}]" if low and high else mean, *rest)


def paper_cells(scores: Mapping[str, Any], digits: int = 2) -> tuple[str, ...]:
    """The paper's cells under `COLUMNS`; empty if it gives no number."""
    return tuple("" if scores.get(key) is None else f"{scores[key]:.{digits}f}" for key in KEYS)


def run_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of one run, named and under `COLUMNS`: test, validation, its other soups, the paper's test."""
    data, digits = ("test", "validation"), metric_of([result]).digits
    rows = [(name, *cells_of(result[name], digits)) for name in data if result.get(name)]
    for kind in SOUPS:
        soups = other_soups(result, kind)
        rows += [(with_soups(name, kind), *paper_cells(soups[name], digits)) for name in data if soups.get(name)]
    best = result.get("best_soup") or {}
    for name in data:
        if (score := (best.get(name) or {}).get("score")) is not None:
            rows.append((f"{name}, best average soup (epoch {best['epoch']})", "", "", f"{score:.{digits}f}", ""))
    if result.get("paper"):
        rows.append((with_soups(PAPER_ROW, result.get("paper_soups")), *paper_cells(result["paper"])))
    return rows


def with_soups(name: str, kind: str | None) -> str:
    """The name of a row, with the kind of its soups if they are not plain averages."""
    return f"{name}, {SOUPS[kind]}" if kind in SOUPS else name


def compare_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per method, in order of appearance: its name and, under `COLUMNS`, means over its runs.

    With several seeds each cell is `mean (standard deviation)` over runs; the range in the first column is over all
    members of all runs. Runs of one method that differ in more than the seed get separate rows. Unfinished runs are
    left out of the means. Other kinds of soup that all runs of a method have get a row of their own.
    """
    rows: list[tuple[str, ...]] = []
    digits = metric_of(results).digits
    for label, group in runs_by_setting(results).items():
        runs = [scores for _, result in group if (scores := scores_of(result))]
        if len(runs) <= 1:
            rows.append((label, *(cells_of(runs[0], digits) if runs else NOT_FINISHED)))
        else:
            mean, *rest = (_cell([run.get(key) for run in runs], digits) for key in KEYS)
            lows, highs = ([run[key] for run in runs if run.get(key) is not None] for key in ("min", "max"))
            spread = f" [{min(lows):.{digits}f}, {max(highs):.{digits}f}]" if lows and highs else ""
            rows.append((label, mean + spread, *rest))
        for kind in SOUPS:
            found = [scores_of(soups) for _, result in group if (soups := other_soups(result, kind))]
            if len(found) == len(group):
                cells = (_cell([one.get(key) for one in found], digits) for key in ("average_soup", "greedy_soup"))
                rows.append((with_soups(label, kind), "", "", *cells))
    return rows


def details_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Head and rows of the metric's details, such as the F1 of each class; no rows if it has none.

    One row per method for its members' mean, their ensemble and the soups, means over its runs; each followed by the
    paper's, in its full setting, if it gives the same.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for label, group in runs_by_setting(results).items():
        first = group[0][1]
        is_single = all(len(scores_of(result).get("members", ())) == 1 for _, result in group)
        for key in ("mean",) if is_single else KEYS:
            details = [(scores_of(result).get("details") or {}).get(key) for _, result in group]
            if any(details):
                name = label if is_single else f"{label}: {key.replace('_', ' ')}"
                found[name] = [one for one in details if one]
                if paper := (first.get("paper_details") or {}).get(key):
                    soups = first.get("paper_soups") if key.endswith("_soup") else None
                    found[with_soups(f"paper's {name}", soups)] = [paper]
    digits = metric_of(results).digits
    names = list(dict.fromkeys(name for given in found.values() for one in given for name in one))
    # Such as losses and calibration errors beside percentages.
    small = {name for name in names if all(abs(one.get(name) or 0) < 10 for given in found.values() for one in given)}

    def cell(given: Sequence[Mapping[str, Any]], name: str) -> str:
        return _cell([one[name] for one in given if name in one], max(digits, 3) if name in small else digits)

    rows = [(label, *(cell(given, name) for name in names)) for label, given in found.items()]
    return ("", *names), rows


def _cell(values: Sequence[float | None], digits: int) -> str:
    """A number, or the mean and standard deviation of several."""
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return "not finite"
    if len(found) > 1:
        return f"{statistics.mean(found):.{digits}f} ({statistics.stdev(found):.{digits}f})"
    return f"{found[0]:.{digits}f}" if found else ""


GAP_COLUMN = "gap closed"
"""The column after `COLUMNS` if there are independent members among the runs."""
LOWEST = -100.0
"""The lowest percentage that is shown as a number."""


def gap_closed(soup: float, mean: float, ensemble: float, *, higher_is_better: bool = True) -> float | None:
    """The share of the gap between independent members and their ensemble that a soup closes, in percent.

    `100 (soup - mean) / (ensemble - mean)`: 0 for a soup as good as an independent member, 100 for one as good as the
    ensemble; None if the ensemble is no better than its members.

    Example:
        >>> gap_closed(79.0, mean=75.0, ensemble=80.0)
        80.0
        >>> gap_closed(79.0, mean=75.0, ensemble=75.0)
    """
    is_gap = ensemble > mean if higher_is_better else ensemble < mean
    return 100.0 * (soup - mean) / (ensemble - mean) if is_gap else None


def gap_text(share: float | None) -> str:
    """A share for a table; how far a collapsed soup is below the members' mean is not shown.

    Example:
        >>> gap_text(61.4), gap_text(-1397.0), gap_text(None)
        ('61%', 'below -100%', '')
    """
    if share is None:
        return ""
    return f"{share:.0f}%" if share >= LOWEST else f"below {LOWEST:.0f}%"


def mean_gap_closed(
    runs: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], soups: str | None = None
) -> float | None:
    """The share of the gap that the average soups of some runs close, from means over their seeds.

    The independent runs of the same seeds are among `results`; runs without one are left out. `soups` is a key of
    `SOUPS`, or None for plain averages. None if no run has an independent counterpart, or there is no gap.
    """
    found = []
    for run in runs:
        independent = scores_of(independent_counterpart(run, results))
        own = run if soups is None else run.get(soups) or {}
        scores = (scores_of(own).get("average_soup"), independent.get("mean"), independent.get("ensemble"))
        if None not in scores:
            found.append(scores)
    if not found:
        return None
    soup, mean, ensemble = map(fmean, zip(*found, strict=True))
    return gap_closed(soup, mean, ensemble, higher_is_better=metric_of(runs).higher_is_better)


def compare_table(results: Sequence[Mapping[str, Any]], *, has_paper: bool = True) -> Table:
    """Head and rows of a comparison, each method followed by the paper's row for the same method and soups.

    With independent members among the runs, the last column says how much of their gap each soup closes.
    """
    settings = runs_by_setting(results)
    papers = {}
    for label, group in settings.items():
        if has_paper and (paper := group[0][1].get("paper")):
            own = with_soups(label, group[0][1].get("paper_soups"))
            papers[own] = (f"paper's {own}", *paper_cells(paper))
    rows = [row for own in compare_rows(results) for row in (own, papers.pop(own[0], None)) if row is not None]
    rows += papers.values()
    head = ("method", *COLUMNS)
    if not any(is_independent(group) for group in settings.values()):
        return head, rows
    gaps = {
        with_soups(label, soups): gap_text(mean_gap_closed([result for _, result in group], results, soups))
        for label, group in settings.items()
        for soups in (None, *SOUPS)
    }
    return (*head, GAP_COLUMN), [(*row, gaps.get(row[0], "")) for row in rows]


def independent_counterpart(run: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The independent run that differs from a run only in how members are averaged; empty if there is none."""
    wanted = _training_options(run)
    independent = (other for other in results if other.get("method") == "independent")
    return next((other for other in independent if _training_options(other) == wanted), {})


def _training_options(result: Mapping[str, Any]) -> dict[str, Any]:
    """The options that determine how the members of a run would train without averaging."""
    config = {
        name: value
        for name, value in flat(result.get("config"))
        if name not in NOT_COMPARED and not name.startswith(("average.", "coupling."))
    }
    return {**config, "recipe": result.get("recipe"), "seed": result.get("seed")}
