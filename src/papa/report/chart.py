"""Line charts as inline SVG, with the numbers behind them in a table."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 260
MOST_POINTS = 400
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 40


def line_chart(
    title: str, series: Mapping[str, Sequence[tuple[float, float | None]]], *, x_label: str, y_label: str
) -> str:
    """A figure with one line per series, and a table of its points.

    Args:
        title: the caption.
        series: points `(x, y)` by name; points that are not finite are left out.
        x_label: what runs to the right.
        y_label: what runs up.
    """
    lines = {
        name: [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    lines = {name: _thinned(points) for name, points in lines.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_range, y_range = _padded(min(xs), max(xs), 0.0), _padded(min(ys), max(ys), 0.05)
    parts = [_grid(x_range, y_range), _labels(x_label, y_label)]
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{_x(x, x_range):.1f},{_y(y, y_range):.1f}" for x, y in points)
        look = f"s{number % 6} d{number // 6 % 3}"
        parts.append(f'<polyline class="{look}" points="{path}"><title>{html.escape(name)}</title></polyline>')
    legend = "".join(
        f'<span class="s{number % 6} d{number // 6 % 3}">{html.escape(name)}</span>'
        for number, name in enumerate(lines)
    )
    label = html.escape(f"{title}: {y_label} against {x_label} for {', '.join(lines)}", quote=True)
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg><p class="legend">{legend}</p>'
        f"<details><summary>numbers</summary>{_table(lines, x_label)}</details></figure>"
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS`, the last always among them; more could not be told apart."""
    stride = -(-len(points) // MOST_POINTS)
    return points[::-stride][::-1]


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    margin = (high - low) * share or (0.5 if high == low else 0.0)
    return low - margin, high + margin


def _x(value: float, span: tuple[float, float]) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - span[0]) / (span[1] - span[0])


def _y(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - span[0]) / (span[1] - span[0])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= min((factor for factor in (1, 2, 5, 10)), key=lambda factor: abs((high - low) / (step * factor) - count))
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step) + 1)]


def _grid(x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    parts = []
    for value in ticks(*y_range):
        y = _y(value, y_range)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in (value for value in ticks(*x_range) if value == round(value)):  # epochs and steps are whole
        parts.append(
            f'<text x="{_x(value, x_range):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        )
    return "".join(parts)


def _labels(x_label: str, y_label: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>'
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>'
    )


def _table(lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str) -> str:
    values = {name: dict(points) for name, points in lines.items()}
    xs = sorted({x for points in values.values() for x in points})
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (x_label, *values))
    body = "".join(
        f"<tr><td>{x:g}</td>"
        + "".join(f"<td>{points[x]:.4g}</td>" if x in points else "<td></td>" for points in values.values())
        + "</tr>"
        for x in xs
    )
    return f"<table><tr>{head}</tr>{body}</table>"
