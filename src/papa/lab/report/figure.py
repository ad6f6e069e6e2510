"""Figures as data: what is drawn, what it says in words, and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from papa.lab.report.fields import plain

Item = TypeVar("Item")
Point: TypeAlias = tuple[float, float]
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]

MOST_POINTS = 2400
"""In one figure; more could not be told apart, and would make the page large."""
MOST_ROWS = 100
"""In the table behind a figure."""


@dataclass(frozen=True)
class Line:
    """One line of a figure."""

    name: str
    points: Sequence[Point]
    look: str = "member"
    """`member` (a colour and a marker of its own), `mean` or `ensemble` (strong)."""
    band: Sequence[tuple[float, float, float]] = ()
    """Where it is a mean: x, lowest and highest of what it is a mean of."""
    place: int | None = None
    """Which colour and marker it has; None for those of its place in the figure."""


@dataclass(frozen=True, kw_only=True)
class LineFigure:
    """Lines over epochs, steps or coefficients."""

    name: str
    """For files and anchors."""
    title: str
    caption: str
    """How to read it."""
    x_label: str
    y_label: str
    lines: Sequence[Line]
    has_zero: bool = False
    """Whether to draw the line y = 0."""

    @property
    def alt(self) -> str:
        """What a reader who cannot see it should know."""
        ends = "; ".join(f"{line.name} {plain(line.points[-1][1])}" for line in self.lines[:12])
        left_out = f"; and {len(self.lines) - 12} more" if len(self.lines) > 12 else ""
        last = plain(max(line.points[-1][0] for line in self.lines))
        return f"{self.title}. {self.y_label} against {self.x_label}. At {self.x_label} {last}: {ends}{left_out}."

    def table(self) -> Table:
        """Its numbers, one row per x; evenly spaced ones where there are very many."""
        values = [dict(line.points) for line in self.lines]
        rows = spread(sorted({x for line in values for x in line}), MOST_ROWS)
        head = [self.x_label, *(line.name for line in self.lines)]
        return head, [[plain(x, 6), *(plain(line.get(x)) for line in values)] for x in rows]

    @property
    def is_thinned(self) -> bool:
        """Whether the table leaves out points."""
        return len({x for line in self.lines for x, _ in line.points}) > MOST_ROWS


@dataclass(frozen=True, kw_only=True)
class DotFigure:
    """Values side by side: one row for each thing, in each row one or more dots of each series."""

    name: str
    title: str
    caption: str
    x_label: str
    rows: Mapping[str, Mapping[str, Sequence[float]]]
    """By row, by series."""

    @property
    def series(self) -> list[str]:
        """The names of its series, in order."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    @property
    def alt(self) -> str:
        """What a reader who cannot see it should know."""
        said = [
            f"{label}: " + ", ".join(f"{name} {' '.join(map(plain, values))}" for name, values in row.items())
            for label, row in spread(list(self.rows.items()), 12)
        ]
        left_out = f"; and {len(self.rows) - 12} more" if len(self.rows) > 12 else ""
        return f"{self.title}. {self.x_label}. {'; '.join(said)}{left_out}."

    def table(self) -> Table:
        """Its numbers, one row per row."""
        rows = [
            [label, *(", ".join(plain(value, 6) for value in row.get(name, ())) for name in self.series)]
            for label, row in spread(list(self.rows.items()), MOST_ROWS)
        ]
        return ["", *self.series], rows

    @property
    def is_thinned(self) -> bool:
        """Whether the table leaves out rows."""
        return len(self.rows) > MOST_ROWS


Figure: TypeAlias = LineFigure | DotFigure


def points(pairs: Iterable[tuple[float | None, float | None]]) -> list[Point]:
    """The pairs that are numbers on both sides."""
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, evenly spaced, the first and the last among them.

    Example:
        >>> spread([0, 1, 2, 3, 4, 5, 6], 4)
        [0, 2, 4, 6]
    """
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def thinned(line: Sequence[Point], count: int) -> list[Point]:
    """At most about `count` points that draw the same picture: of each stretch the lowest and the highest.

    Example:
        >>> thinned([(0, 0), (1, 9), (2, 0), (3, 0), (4, -7), (5, 0), (6, 0), (7, 1)], 6)
        [(0, 0), (1, 9), (4, -7), (7, 1)]
    """
    if len(line) <= count:
        return list(line)
    num_stretches = max(1, (count - 2) // 2)
    kept = {0, len(line) - 1}
    for stretch in range(num_stretches):
        first, end = (len(line) * (stretch + side) // num_stretches for side in (0, 1))
        inside = range(first, end)
        kept |= {min(inside, key=lambda index: line[index][1]), max(inside, key=lambda index: line[index][1])}
    return [line[index] for index in sorted(kept)]


def padded(values: Iterable[float], share: float) -> tuple[float, float]:
    """A range a little wider than the values, never empty."""
    found = list(values)
    low, high = min(found), max(found)
    size = max(abs(low), abs(high))
    margin = (high - low) * share
    if high - low <= 1e-9 * size or high == low:
        margin = 0.05 * size or 0.5
    return low - margin, high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them.

    Example:
        >>> ticks(0.0, 21.0)
        [0.0, 5.0, 10.0, 15.0, 20.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs((high - low) / (power * factor) - count))
    return [float(f"{index * step:.12g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
