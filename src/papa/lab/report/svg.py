"""Drawing figures as SVG: plain shapes and text, coloured by classes."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from papa.lab.report.fields import plain, printable
from papa.lab.report.figure import MOST_POINTS, DotFigure, Figure, Line, LineFigure, padded, spread, thinned, ticks

WIDTH = 480
PLOT_HEIGHT = 220
LEFT, RIGHT, TOP, BELOW = 56, 14, 26, 48
DOT_TOP, ROW, LEGEND_ROW = 10, 24, 18
CHARACTER = 7.0
"""How wide a character of a label is taken to be."""
MOST_LEGENDS, MOST_DOT_ROWS, MOST_LABEL = 14, 60, 24
NUM_COLOURS = 6
FEW, MANY = 4.8, 3.2
"""How large dots are: one in a row, or several."""

LIGHT = {
    **{"ink": "#1b2330", "paper": "#ffffff", "line": "#dbe0e7", "quiet": "#586474", "panel": "#f5f7fa"},
    **{"c0": "#1f4dbe", "c1": "#c26a00", "c2": "#0a9e74", "c3": "#8d3a83", "c4": "#5a3413", "c5": "#3f95e8"},
}
DARK = {
    **{"ink": "#e8ebf0", "paper": "#14181f", "line": "#343d4a", "quiet": "#a3aebd", "panel": "#1b212b"},
    **{"c0": "#7da2ff", "c1": "#ee8a35", "c2": "#1fae8c", "c3": "#f3b6e0", "c4": "#efe37f", "c5": "#a06bff"},
}
"""Colours that stay apart for readers who see no red or no green, and stand out from the paper."""

FONTS = "system-ui, 'Liberation Sans', 'DejaVu Sans', Arial, sans-serif"
"""Whom figures ask for letters, in turn: not every renderer knows a font for a generic name."""

STYLE = (
    f"""
svg text {{ font-family: {FONTS}; font-size: 12px; fill: var(--quiet); }}
"""
    + """
svg .grid { stroke: var(--line); } svg .zero { stroke: var(--quiet); stroke-dasharray: 2 3; }
svg .ink { color: var(--ink); } svg .c0 { color: var(--c0); } svg .c1 { color: var(--c1); }
svg .c2 { color: var(--c2); } svg .c3 { color: var(--c3); } svg .c4 { color: var(--c4); } svg .c5 { color: var(--c5); }
svg .line { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linejoin: round; }
svg .strong { stroke-width: 2.6; } svg .dash1 { stroke-dasharray: 7 4; } svg .dash2 { stroke-dasharray: 2 3; }
svg .mark { fill: currentColor; stroke: var(--paper); stroke-width: .6; } svg .cross { stroke: currentColor;
  stroke-width: 1.8; fill: none; }
svg .band { fill: currentColor; fill-opacity: .15; }
svg .far { fill: var(--ink); stroke: var(--paper); stroke-width: 4; paint-order: stroke; }
"""
)


def svg(figure: Figure) -> str:
    """A figure as an `<svg>` element; its colours come from the page's style."""
    return _lines(figure) if isinstance(figure, LineFigure) else _dots(figure)


def standalone_svg(figure: Figure) -> str:
    """A figure as an SVG file of its own, on white."""
    style = re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], STYLE.replace("system-ui, ", ""))
    opening, rest = svg(figure).split(">", 1)
    return printable(f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}')


def _lines(figure: LineFigure) -> str:
    members_first = sorted(figure.lines, key=lambda line: line.look != "member")
    looks = [(line, _look(line, place)) for place, line in enumerate(members_first)]
    xs = [x for line in figure.lines for x, _ in line.points]
    ys = [y for line in figure.lines for _, y in line.points]
    ys += [y for line in figure.lines for _, *ends in line.band for y in ends] + [0.0] * figure.has_zero
    bottom, x_span, y_span = TOP + PLOT_HEIGHT, padded(xs, 0.0), padded(ys, 0.06)
    to_x, to_y = _scale(x_span, LEFT, WIDTH - RIGHT), _scale(y_span, bottom, TOP)
    parts = [_y_grid(y_span, to_y), _x_ticks(_whole_where(xs, ticks(*x_span)), to_x, bottom)]
    if figure.has_zero:
        y = to_y(0.0)
        parts.append(f'<line class="zero" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(_axis_labels(figure.x_label, figure.y_label, bottom))
    count = max(40, MOST_POINTS // len(figure.lines))
    parts += [_line(line, look, number, count, to_x, to_y) for number, (line, look) in enumerate(looks)]
    strong_first = sorted(looks, key=lambda pair: pair[0].look == "member")
    legend, height = _legend([(line.name, *look) for line, look in strong_first], bottom + BELOW, is_line=True)
    return _svg(figure, [*parts, legend], height)


def _look(line: Line, place: int) -> tuple[str, int, str]:
    """Colour class, marker (-1 for none) and the classes of the stroke."""
    number = place if line.place is None else line.place
    if line.look == "mean":
        return "ink", -1, "line strong"
    if line.look == "ensemble":
        return "ink", -1, "line strong dash1"
    return f"c{number % NUM_COLOURS}", number % len(MARKERS), f"line dash{number // NUM_COLOURS % 3}"


def _line(
    line: Line,
    look: tuple[str, int, str],
    number: int,
    count: int,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> str:
    colour, shape, stroke = look
    drawn = [(to_x(x), to_y(y)) for x, y in thinned(line.points, count)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    parts = [f"<title>{html.escape(line.name)}</title>"]
    if line.band:
        band = spread(line.band, count)
        around = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
        outline = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in around)
        parts.append(f'<polygon class="band" points="{outline}"/>')
    parts.append(f'<polyline class="{stroke}" points="{path}"/>')
    if shape >= 0:
        few = drawn if len(drawn) <= 8 else drawn[number % 3 :: max(1, len(drawn) // 7)]
        parts.append(_marks(shape, few, 3.4))
    elif len(drawn) == 1:
        parts.append(_marks(0, drawn, 3.4))
    return f'<g class="{colour}">{"".join(parts)}</g>'


def _dots(figure: DotFigure) -> str:
    rows = spread(list(figure.rows.items()), MOST_DOT_ROWS)
    series = figure.series
    left = 20 + CHARACTER * min(MOST_LABEL, max(len(label) for label, _ in rows))
    values = [value for _, row in rows for dots in row.values() for value in dots]
    span = padded(_without_far_out(values), 0.08)
    to_x = _scale(span, left, WIDTH - RIGHT - 8)
    bottom = DOT_TOP + ROW * len(rows)
    parts = [_x_ticks(ticks(*span), to_x, bottom, grid_from=DOT_TOP)]
    parts.append(
        f'<text x="{(left + WIDTH - RIGHT) / 2:.0f}" y="{bottom + 35}" text-anchor="middle">'
        f"{html.escape(figure.x_label)}</text>"
    )
    for index, (label, row) in enumerate(rows):
        y = DOT_TOP + ROW * (index + 0.5)
        parts.append(f'<text x="{left - 10:.0f}" y="{y + 4:.1f}" text-anchor="end">{_short(label)}</text>')
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for name in sorted(row, key=series.index, reverse=True):  # the first series on top
            places = [(to_x(value), y) for value in row[name] if span[0] <= value <= span[1]]
            parts.append(_row_dots(name, series.index(name), places, MANY if len(row[name]) > 1 else FEW))
        parts += _far_out(row, y, span, to_x)
    legend, height = _legend(
        [(name, f"c{number % NUM_COLOURS}", number % len(MARKERS), "") for number, name in enumerate(series)],
        bottom + BELOW,
        is_line=False,
    )
    return _svg(figure, [*parts, legend], height)


def _row_dots(name: str, number: int, places: Sequence[tuple[float, float]], radius: float) -> str:
    marks = _marks(number % len(MARKERS), places, radius)
    return f'<g class="c{number % NUM_COLOURS}"><title>{html.escape(name)}</title>{marks}</g>'


def _far_out(
    row: Mapping[str, Sequence[float]], y: float, span: tuple[float, float], to_x: Callable[[float], float]
) -> Iterator[str]:
    """What lies beyond the edges, in words; of several values the table tells the rest."""
    for is_low, anchor, words in ((True, "start", "← {}"), (False, "end", "{} →")):
        far = {
            name: values[0]
            for name, values in row.items()
            if len(values) == 1 and (values[0] < span[0] if is_low else values[0] > span[1])
        }
        if far:
            said = "; ".join(f"{name} {plain(value)}" for name, value in far.items())
            x = to_x(span[0] if is_low else span[1])
            yield (
                f'<text class="far" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">'
                f"{html.escape(words.format(said))}</text>"
            )


def _without_far_out(values: list[float]) -> list[float]:
    """The values within Tukey's outer fences, three interquartile ranges around the middle half."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    reach = 3 * (high - low)
    return [value for value in ordered if low - reach <= value <= high + reach] if reach else ordered


def _scale(span: tuple[float, float], start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - span[0]) / (span[1] - span[0])


def _y_grid(span: tuple[float, float], to_y: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{to_y(value):.1f}" y2="{to_y(value):.1f}"/>'
        f'<text x="{LEFT - 7}" y="{to_y(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        for value in ticks(*span)
    )


def _x_ticks(
    values: Iterable[float], to_x: Callable[[float], float], bottom: float, grid_from: float | None = None
) -> str:
    parts = []
    for value in values:
        x = to_x(value)
        if grid_from is not None:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{grid_from}" y2="{bottom:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{value:.6g}</text>')
    return "".join(parts)


def _whole_where(xs: Sequence[float], values: Sequence[float]) -> list[float]:
    """Whole numbers alone where all of x is whole, as epochs and steps are."""
    return [value for value in values if value == round(value)] if all(x == round(x) for x in xs) else list(values)


def _axis_labels(x_label: str, y_label: str, bottom: float) -> str:
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{bottom + 35:.0f}" text-anchor="middle">'
        f'{html.escape(x_label)}</text><text x="2" y="{TOP - 13}">{html.escape(y_label)}</text>'
    )


def _legend(entries: list[tuple[str, str, int, str]], top: float, *, is_line: bool) -> tuple[str, float]:
    """The legend below a figure, and the figure's height with it."""
    parts, x, y = [], float(LEFT if is_line else 12), top + 8
    shown = [*entries[:MOST_LEGENDS]]
    for name, colour, shape, stroke in shown:
        width = 36 + CHARACTER * min(MOST_LABEL, len(name)) + 8
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT if is_line else 12), y + LEGEND_ROW
        stretch = f'<path class="{stroke}" d="M{x:.1f} {y - 4:.1f}h24"/>' if is_line else ""
        mark = _marks(shape, [(x + 12, y - 4)], 3.6) if shape >= 0 else ""
        parts.append(f'<g class="{colour}">{stretch}{mark}</g><text x="{x + 30:.1f}" y="{y:.1f}">{_short(name)}</text>')
        x += width
    if len(entries) > MOST_LEGENDS:
        y += LEGEND_ROW
        parts.append(f'<text x="{LEFT}" y="{y:.1f}">and {len(entries) - MOST_LEGENDS} more, see the numbers</text>')
    return "".join(parts), y + 10


def _short(label: str) -> str:
    """A label that fits, its end kept, since names of layers differ there."""
    return html.escape(label if len(label) <= MOST_LABEL else "…" + label[1 - MOST_LABEL :])


def _svg(figure: Figure, parts: Iterable[str], height: float) -> str:
    alt = html.escape(figure.alt, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{alt}">'
        f"<title>{html.escape(figure.title)}</title>{''.join(parts)}</svg>"
    )


def _circle(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r:.1f} 0a{r} {r} 0 1 0 {-2 * r:.1f} 0"


def _polygon(*corners: tuple[float, float]) -> Callable[[float, float, float], str]:
    """A closed shape from its corners, in units of its radius."""

    def draw(x: float, y: float, r: float) -> str:
        return "M" + "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in corners) + "z"

    return draw


def _cross(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}m0 {-2 * r:.1f}l{-2 * r:.1f} {2 * r:.1f}"


MARKERS: tuple[Callable[[float, float, float], str], ...] = (
    _circle,
    _polygon((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    _polygon((0, -1.2), (1.15, 0.8), (-1.15, 0.8)),
    _polygon((0, -1.3), (1.2, 0), (0, 1.3), (-1.2, 0)),
    _cross,
    _polygon((0, 1.2), (1.15, -0.8), (-1.15, -0.8)),
)


def _marks(shape: int, places: Iterable[tuple[float, float]], radius: float) -> str:
    path = "".join(itertools.starmap(lambda x, y: MARKERS[shape](x, y, radius), places))
    kind = "cross" if MARKERS[shape] is _cross else "mark"
    return f'<path class="{kind}" d="{path}"/>' if path else ""
