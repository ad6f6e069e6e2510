"""The gap closed: how much of what an ensemble gains over single networks a soup keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from papa.lab.report.fields import flat, number
from papa.lab.report.metric import metric_of
from papa.lab.report.settings import NOT_COMPARED, runs_by_setting
from papa.lab.report.table import COLUMNS, SOUPS, scores_of, with_soups

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

    Args:
        soup: the score of the soup.
        mean: the mean score of independent members.
        ensemble: the score of their ensemble.
        higher_is_better: whether higher scores are better.
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

    Args:
        runs: results that differ only in the seed.
        results: results that include the independent runs of the same seeds; runs without one are left out.
        soups: the kind of soups, a key of `SOUPS`; None for plain averages.

    Returns:
        A percentage; None if no run has an independent counterpart, or there is no gap.
    """
    found = []
    for run in runs:
        independent = scores_of(_independent_counterpart(run, results))
        own = run if soups is None else run.get(soups)
        soup = number(scores_of(own).get("average_soup")) if isinstance(own, Mapping) else None
        mean, ensemble = number(independent.get("mean")), number(independent.get("ensemble"))
        if soup is not None and mean is not None and ensemble is not None:
            found.append((soup, mean, ensemble))
    if not found:
        return None
    soup, mean, ensemble = map(fmean, zip(*found, strict=True))
    return gap_closed(soup, mean, ensemble, higher_is_better=metric_of(runs).higher_is_better)


def with_gap_closed(
    results: Sequence[Mapping[str, Any]], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of a comparison, with the gap closed if there are independent members among the runs.

    Args:
        results: the results that are compared.
        rows: the rows of `compare_rows` for them, and perhaps the paper's, which get an empty cell.
    """
    head = ("method", *COLUMNS)
    if not any(result.get("method") == "independent" for result in results):
        return head, list(rows)
    cells: dict[str, str] = {}
    for label, group in runs_by_setting(results).items():
        for soups in (None, *SOUPS):
            share = mean_gap_closed([result for _, result in group], results, soups)
            cells[with_soups(label, soups)] = gap_text(share)
    return (*head, GAP_COLUMN), [(*row, cells.get(row[0], "")) for row in rows]


def _independent_counterpart(run: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The independent run that differs from a run only in how members are averaged; empty if there is none."""
    wanted = _training_options(run)
    independent = (other for other in results if other.get("method") == "independent")
    return next((other for other in independent if _training_options(other) == wanted), {})


def _training_options(result: Mapping[str, Any]) -> dict[str, Any]:
    """The options that determine how the members of a run would train without averaging."""
    config = {
        name: value
        for name, value in flat(result.get("config"))
        if name not in NOT_COMPARED and not name.startswith("average.")
    }
    return {**config, "recipe": result.get("recipe"), "seed": result.get("seed")}
