"""What a table of the paper is made of: rows, each a recipe with changes, and the paper's numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from papa.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what to run, and what the paper reports."""

    name: str
    """What the row is picked by; unique in its table."""
    title: str
    """What it is, for readers."""
    recipe: str | None
    """The recipe it runs; None for numbers that the paper quotes from others."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """What is different from the recipe's full setting, by the config's dotted names."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's numbers by column."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """The paper's standard deviations, where it gives them."""
    part: str = "test"
    """Where in a result its columns are: `test`; or `aligned`, `repaired` or `trajectory` for such networks."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of the paper."""

    label: str
    """The paper's label; ours where it has none."""
    title: str
    """What it shows, in one line."""
    columns: tuple[str, ...]
    """Which numbers of a result it compares; see `number`."""
    rows: tuple[Row, ...]
    kind: str = "table"
    """table or figure."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What all its runs need switched on to give these numbers, by the config's dotted names."""

    @property
    def name(self) -> str:
        """What it is asked for by, such as `table:ablation1`."""
        return f"{self.kind}:{self.label}"

    def pick(self, names: Sequence[str] | None) -> tuple[Row, ...]:
        """Some of its rows, in the table's order; all when None."""
        if names is None:
            return self.rows
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.name} has no row {name}: {did_you_mean(name, known)}")
        return tuple(row for row in self.rows if row.name in names)


def number(result: Mapping[str, Any], row: Row, column: str) -> float | None:
    """A column's number in a run's result; None when the run does not have it.

    Columns are the keys of a result's scores (`mean`, `min`, `max`, `ensemble`, `average_soup`, `greedy_soup`), or
    `greedy_size` for how many members are in the greedy soup, `members.2` and `soup.2` for the cosine similarity at
    the second layer, and `details.average_soup.F1 cars` for one of the details of a score.
    """
    kind, _, rest = column.partition(".")
    if kind == "greedy_size":
        return float(len(_part(result, row).get("greedy_members") or result["greedy_members"]))
    if kind in ("members", "soup"):
        values = (result.get("similarity") or {}).get(kind) or ()
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
    part: Mapping[str, Any] = (result if row.part == "test" else result.get(row.part)) or {}
    return part


def _scores(result: Mapping[str, Any], row: Row) -> Mapping[str, Any]:
    """The row's own networks' scores; what only the members have (their mean, the ensemble) is theirs."""
    shared = result.get("test") or result.get("validation") or {}
    part = _part(result, row)
    return {**shared, **(part.get("test") or part.get("validation") or {})}
