"""Plots as data: what is drawn, its words, and the table of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias, TypeVar

from papa.lab.report.words import plain

Item = TypeVar("Item")
Point: TypeAlias = tuple[float, float]
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]

MAX_NAMED = 12
"""The number of lines or rows that the text alternative lists."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The words of a plot."""

    name: str
    """Used for file names and anchors."""
    title: str
    caption: str
    """How to read it."""
    x_label: str


@dataclass(frozen=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[Point]
    color: str = "ink"
    """A name from the palette, see `papa.lab.report.draw`."""
    is_member: bool = False
    """Members are drawn thin and without a label."""
    band: Sequence[tuple[float, float, float]] = ()
    """x, lowest and highest value: drawn as an area behind the line."""


@dataclass(frozen=True, kw_only=True)
class LinePlot(Plot):
    """Lines over epochs, steps or coefficients."""

    y_label: str
    lines: Sequence[Line]
    has_zero: bool = False
    """Whether to draw the line y = 0."""
    hides_far: bool = False
    """Whether a line that stays far below all others, such as a collapsed soup, is only named at the edge."""
    is_log: bool = False
    """Whether the x axis is logarithmic."""
    names_points: bool = False
    """Whether names stand at the points instead of beside the axes."""

    @property
    def alt(self) -> str:
        """The text alternative: the last value of each line."""
        ends = [f"{line.name} {plain(line.points[-1][1])}" for line in self.lines]
        last = plain(max(line.points[-1][0] for line in self.lines))
        return f"{self.title}. {self.y_label} against {self.x_label}. At {self.x_label} {last}: {_listed(ends)}."

    def table(self) -> Table:
        """Head and rows: one row per x."""
        values = [dict(line.points) for line in self.lines]
        xs = sorted({x for line in values for x in line})
        rows = [[plain(x, 6), *(plain(line.get(x)) for line in values)] for x in xs]
        return [self.x_label, *(line.name for line in self.lines)], rows


@dataclass(frozen=True, kw_only=True)
class DotPlot(Plot):
    """One row per thing; in each row one mark per series, and small marks for single values."""

    rows: Mapping[str, Mapping[str, Sequence[float]]]
    """Values by row and series; the large mark is their mean."""
    colors: Mapping[str, str] = field(default_factory=dict)
    """A palette color for each row; without them each series has its own color."""
    connect: tuple[str, str] | None = None
    """Two series that a thick line connects in each row."""
    reference: str | None = None
    """The row with the range that is shaded behind all rows."""
    value_series: str | None = None
    """The series with the means that are printed at the right."""
    digits: int = 1
    """Digits after the point of means that are printed."""

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    @property
    def alt(self) -> str:
        """The text alternative: the mean of each series in each row."""
        rows = [
            f"{label}: " + ", ".join(f"{name} {plain(fmean(values))}" for name, values in row.items())
            for label, row in self.rows.items()
        ]
        return f"{self.title}. {self.x_label}. {_listed(rows)}."

    def table(self) -> Table:
        """Head and rows: all values of each row."""
        series = self.series
        return ["", *series], [
            [label, *(", ".join(plain(value, 6) for value in row.get(name, ())) for name in series)]
            for label, row in self.rows.items()
        ]


AnyPlot: TypeAlias = LinePlot | DotPlot


def points(pairs: Iterable[tuple[float | None, float | None]]) -> list[Point]:
    """The pairs in which both values are numbers."""
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, evenly spaced, including the first and the last.

    Example:
        >>> evenly_spaced([0, 1, 2, 3, 4, 5, 6], 4)
        [0, 2, 4, 6]
    """
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _listed(words: Sequence[str]) -> str:
    more = f"; and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    return "; ".join(words[:MAX_NAMED]) + more
