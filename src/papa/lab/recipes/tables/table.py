"""A table of the paper: rows, each a recipe with changes, and the paper's numbers for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from papa.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what to run, and what the paper reports."""

    name: str
    """Unique in its table; selects the row."""
    title: str
    """For readers."""
    recipe: str | None
    """The recipe it runs; None for numbers that the paper quotes from others."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """The differences to the recipe's full setting, by the config's dotted names."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's numbers by column."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """The paper's standard deviations, where it gives them."""
    num_runs: int | None = None
    """The number of the paper's runs; None for three where it gives a standard deviation, else one."""
    part: str = "test"
    """The part of a result that holds its columns: `test`; `aligned`, `repaired`, `trajectory` or `trajectory.aligned`
    for such networks; or `plain` for the similarity of features without matching."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The paper's seeds, from 1."""
        return tuple(range(1, 1 + (self.num_runs or (3 if self.spread else 1))))


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper."""

    label: str
    """The paper's label; ours where it has none."""
    title: str
    """One line for listings."""
    columns: tuple[str, ...]
    """The numbers of a result that it compares; see `number`."""
    rows: Sequence[Row]
    kind: str = "table"
    """table or figure."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that all its runs need to give these numbers, by the config's dotted names."""

    @property
    def name(self) -> str:
        """Kind and label, such as `table:ablation1`."""
        return f"{self.kind}:{self.label}"

    def pick(self, names: Sequence[str] | None) -> tuple[Row, ...]:
        """Some of its rows, in the table's order; all when None."""
        if names is None:
            return tuple(self.rows)
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.name} has no row {name}: {did_you_mean(name, known)}")
        return tuple(row for row in self.rows if row.name in names)


def named(columns: Sequence[str], cells: Sequence[float]) -> dict[str, float]:
    """Numbers by their column."""
    return dict(zip(columns, cells, strict=True))


def number(result: Mapping[str, Any], row: Row, column: str) -> float | None:
    """A column's number in a run's result; None when the run does not have it.

    Columns are the keys of a result's scores (`mean`, `min`, `max`, `ensemble`, `average_soup`, `greedy_soup`), or
    `greedy_size` for the number of members in the greedy soup, `members.2` and `soup.2` for the cosine similarity at
    the second layer, `details.average_soup.F1 cars` for one of the details of a score, and `greedy_as_it_is` for the
    greedy soup of averages along trajectories without re-estimated BatchNorm. Soups are those of the row's part, never
    of another; means and ensembles are those of the members.
    """
    kind, _, rest = column.partition(".")
    if kind == "greedy_size":
        members = _part(result, row).get("greedy_members")
        return None if members is None else float(len(members))
    if kind == "greedy_as_it_is":
        value = ((result.get("trajectory") or {}).get(kind) or {}).get("test")
        return None if value is None else float(value)
    if kind in ("members", "soup"):
        similarity = result.get("similarity") or {}
        values = (similarity.get("plain") or {} if row.part == "plain" else similarity).get(kind) or ()
        layer = int(rest) - 1
        return 100.0 * values[layer] if layer < len(values) else None
    scores = _scores(result, row)
    if kind == "details":
        which, _, name = rest.partition(".")
        value = ((scores.get("details") or {}).get(which) or {}).get(name)
    else:
        value = scores.get(column)
    return None if value is None else float(value)


def _part(result: Mapping[str, Any], row: Row) -> Mapping[str, Any]:
    part = result
    for name in () if row.part in ("test", "plain") else row.part.split("."):
        part = part.get(name) or {}
    return part


def _scores(result: Mapping[str, Any], row: Row) -> Mapping[str, Any]:
    """The scores of the row's part, completed by those of the members; soups of another kind are left out."""
    whole = result if row.part.partition(".")[0] != "trajectory" else result.get("trajectory") or {}
    own, members = (part.get("test") or part.get("validation") or {} for part in (_part(result, row), whole))
    details = {**_without_soups(members.get("details") or {}), **(own.get("details") or {})}
    return {**_without_soups(members), **own, "details": details}


def _without_soups(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scores.items() if not name.endswith("_soup")}
