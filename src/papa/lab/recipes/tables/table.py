"""A table of the paper: rows, each a recipe with changes, and the paper's numbers for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
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


FIXED_COLUMNS = 5
"""Row, title, recipe, part and change come first in a file, the numbers after them."""


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper. Its rows are in the file `LABEL.csv` beside this module.

    A cell has the paper's number, and its standard deviation in parentheses if it gives one.
    """

    label: str
    """The paper's label; ours where it has none."""
    title: str
    """One line for listings."""
    kind: str = "table"
    """table or figure."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that all its runs need to give these numbers, by the config's dotted names."""
    num_runs: int | None = None
    """As in `Row`, of all rows."""

    @property
    def name(self) -> str:
        """Kind and label, such as `table:ablation1`."""
        return f"{self.kind}:{self.label}"

    @cached_property
    def _lines(self) -> list[list[str]]:
        path = Path(__file__).with_name(f"{self.label}.csv")
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(line for line in file if not line.startswith("#")))

    @property
    def columns(self) -> tuple[str, ...]:
        """The numbers of a result that it compares; see `number`."""
        return tuple(self._lines[0][FIXED_COLUMNS:])

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """In the paper's order."""
        return tuple(map(self._row, self._lines[1:]))

    def _row(self, line: Sequence[str]) -> Row:
        name, title, recipe, part, change = line[:FIXED_COLUMNS]
        cells = {
            column: cell.rstrip(")").partition(" (")
            for column, cell in zip(self.columns, line[FIXED_COLUMNS:], strict=True)
            if cell
        }
        return Row(
            name=name,
            title=title,
            recipe=recipe or None,
            change={key: _value(text) for key, _, text in (entry.partition("=") for entry in change.split())},
            paper={column: float(value) for column, (value, _, _) in cells.items()},
            spread={column: float(deviation) for column, (_, _, deviation) in cells.items() if deviation},
            num_runs=self.num_runs,
            part=part or "test",
        )

    def pick(self, names: Sequence[str] | None) -> tuple[Row, ...]:
        """Some of its rows, in the table's order; all when None."""
        if names is None:
            return self.rows
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.name} has no row {name}: {did_you_mean(name, known)}")
        return tuple(row for row in self.rows if row.name in names)


def _value(text: str) -> Any:
    """The value of an option: a number, true, false, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


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
