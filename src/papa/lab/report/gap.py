"""How much of what an ensemble gains one network keeps: the share of the gap that a soup closes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from papa.lab.report.fields import flat, number
from papa.lab.report.groups import BESIDE_THE_POINT, groups_of
from papa.lab.report.table import COLUMNS, SOUPS, of_soups, scores_of

GAP_COLUMN = "gap closed"
WORTHLESS = -100.0
"""Beside `COLUMNS`, where independent members are among the runs."""


def gap_closed(soup: float, mean: float, ensemble: float) -> float | None:
    """What share of the gap between independent members and their ensemble a soup closes, in percent.

    `100 (soup - mean) / (ensemble - mean)`: 0 for a soup as good as an independent member, 100 for one as good as the
    ensemble; None where the ensemble is no better than its members.

    Example:
        >>> gap_closed(79.0, mean=75.0, ensemble=80.0)
        80.0
        >>> gap_closed(79.0, mean=75.0, ensemble=75.0)

    Args:
        soup: the score of the soup.
        mean: the mean score of independent members.
        ensemble: the score of their ensemble.
    """
    return 100.0 * (soup - mean) / (ensemble - mean) if ensemble > mean else None


def gap_text(share: float | None) -> str:
    """A share for a table; how far below the members' mean a worthless average is, nobody needs to know.

    Example:
        >>> gap_text(61.4), gap_text(-1397.0), gap_text(None)
        ('61%', 'below -100%', '')
    """
    if share is None:
        return ""
    return f"{share:.0f}%" if share >= WORTHLESS else f"below {WORTHLESS:.0f}%"


def mean_gap_closed(
    runs: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], soups: str | None = None
) -> float | None:
    """What share of the gap the average soups of some runs close, taken from means over their seeds.

    Args:
        runs: results that differ in nothing but the seed.
        results: where the independent runs of the same seeds are; runs without one are left out.
        soups: which kind of soups, of `SOUPS`; None for plain ones.

    Returns:
        A percentage; None where no run has an independent one beside it, or there is no gap.
    """
    found = []
    for run in runs:
        independent = scores_of(_independent_beside(run, results))
        own = run if soups is None else run.get(soups)
        soup = number(scores_of(own).get("average_soup")) if isinstance(own, Mapping) else None
        mean, ensemble = number(independent.get("mean")), number(independent.get("ensemble"))
        if soup is not None and mean is not None and ensemble is not None:
            found.append((soup, mean, ensemble))
    return gap_closed(*map(fmean, zip(*found, strict=True))) if found else None


def with_gap_closed(
    results: Sequence[Mapping[str, Any]], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of a comparison, with the share of the gap where independent members are among the runs.

    Args:
        results: what is compared.
        rows: what `compare_rows` gave for them, with or without the paper's rows, whose share is left empty.
    """
    head = ("method", *COLUMNS)
    if not any(result.get("method") == "independent" for result in results):
        return head, list(rows)
    cells: dict[str, str] = {}
    for label, group in groups_of(results).items():
        for soups in (None, *SOUPS):
            share = mean_gap_closed([result for _, result in group], results, soups)
            cells[of_soups(label, soups)] = gap_text(share)
    return (*head, GAP_COLUMN), [(*row, cells.get(row[0], "")) for row in rows]


def _independent_beside(run: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The independent run that differs from a run in how members are averaged alone; empty where there is none."""
    wanted = _training_of(run)
    beside = (other for other in results if other.get("method") == "independent" and _training_of(other) == wanted)
    return next(beside, {})


def _training_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how a run's members would train on their own."""
    config = {
        name: value
        for name, value in flat(result.get("config"))
        if name not in BESIDE_THE_POINT and not name.startswith("average.")
    }
    return {**config, "recipe": result.get("recipe"), "seed": result.get("seed")}
