"""Figures of reports: drawn with matplotlib, as SVG for pages, and as PDF for papers."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from papa.lab.report.words import plain, printable
from papa.packages import require

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

LIGHT = {
    **{"ink": "#1b2330", "paper": "#ffffff", "line": "#dbe0e7", "quiet": "#586474", "panel": "#f5f7fa"},
    **{"c0": "#1f4dbe", "c1": "#c26a00", "c2": "#0a9e74", "c3": "#8d3a83", "c4": "#5a3413", "c5": "#3f95e8"},
}
DARK = {
    **{"ink": "#e8ebf0", "paper": "#14181f", "line": "#343d4a", "quiet": "#a3aebd", "panel": "#1b212b"},
    **{"c0": "#7da2ff", "c1": "#ee8a35", "c2": "#1fae8c", "c3": "#f3b6e0", "c4": "#efe37f", "c5": "#a06bff"},
}
"""The palette. Colors differ for readers who see no red, no green or no blue, and contrast with the background."""
SERIES_COLORS = ("c0", "c1", "c2", "c3", "c4", "c5")
FONTS = "system-ui, 'Liberation Sans', Arial, sans-serif"
"""The fonts of a page. The layout is made for DejaVu Sans, which is wider than most: labels do not get too long."""
SVG_STYLE = "svg * { stroke-linejoin: round; stroke-linecap: butt; }"
STYLE = {
    **{"font.family": "DejaVu Sans", "font.size": 10.0, "text.parse_math": False, "text.color": LIGHT["ink"]},
    **{"svg.fonttype": "none", "pdf.fonttype": 42, "path.simplify_threshold": 1.0, "figure.facecolor": "none"},
    **{"figure.constrained_layout.w_pad": 6 / 72, "figure.constrained_layout.h_pad": 6 / 72},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.facecolor": "none"},
    **{"axes.edgecolor": LIGHT["line"], "axes.labelcolor": LIGHT["quiet"], "grid.color": LIGHT["line"]},
    **{"grid.linewidth": 0.8, "xtick.color": LIGHT["quiet"], "ytick.color": LIGHT["quiet"]},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False, "legend.fontsize": 9.5},
    **{"legend.handletextpad": 0.5, "legend.columnspacing": 1.2, "legend.borderpad": 0.2, "legend.handlelength": 1.6},
    **{"lines.solid_capstyle": "round", "axes.axisbelow": True, "axes.titlelocation": "left"},
    **{"axes.titlesize": 10.0, "axes.titlecolor": LIGHT["quiet"]},
}
WIDTH, HEIGHT, TITLE_HEIGHT, LEGEND_HEIGHT = 350.0, 220.0, 26.0, 15.0
"""Sizes in points. Text has 10 points, so that a figure is readable on a phone and twice as wide on a desktop."""
MAX_BAND_POINTS, MAX_LABELS, MAX_NAMED = 400, 12, 12
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
STEPS = [1, 2, 5, 10]
"""Ticks are these numbers times a power of ten apart."""

Item = TypeVar("Item")
Point: TypeAlias = tuple[float, float]
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure: its words, its numbers, and how to draw it."""

    name: str
    """Used for file names and anchors."""
    title: str
    caption: str
    """How to read it."""
    alt: str
    """The text alternative."""
    numbers: Table
    draw: Callable[[FigureBase], None]
    height: float = HEIGHT


class Line(NamedTuple):
    """A line of a figure, in a color of the palette."""

    name: str
    points: Sequence[Point]
    color: str = "ink"
    band: Sequence[tuple[float, float, float]] = ()
    """x, lowest and highest value: drawn as an area behind the line."""
    is_member: bool = False
    """Members are drawn thin and without a label."""


def line_chart(
    name: str,
    title: str,
    caption: str,
    axes: tuple[str, str],
    lines: Iterable[Line],
    *,
    has_zero: bool = False,
    hides_below: bool = False,
    hides_above: bool = False,
    is_log: bool = False,
    names_points: bool = False,
) -> list[Chart]:
    """A figure of the lines that have points; none if there is none.

    Args:
        name: used for file names and anchors.
        title: what is shown.
        caption: how to read it.
        axes: the names of both axes.
        lines: each with its points; those of one color differ in their dashes.
        has_zero: whether to draw the line y = 0.
        hides_below: whether a line that stays far below all others, such as a collapsed soup, is only named.
        hides_above: the same far above, for losses.
        is_log: whether the x axis is logarithmic.
        names_points: whether names stand at the points instead of in a legend.
    """
    drawn, (x_label, y_label) = [line for line in lines if line.points], axes
    if not drawn:
        return []
    values = [dict(line.points) for line in drawn]
    xs = sorted({x for line in values for x in line})
    rows = [[plain(x, 6), *(plain(line.get(x)) for line in values)] for x in xs]
    last = "; ".join(f"{line.name} {plain(line.points[-1][1])}" for line in drawn[:MAX_NAMED])
    more = f"; and {len(drawn) - MAX_NAMED} more" if len(drawn) > MAX_NAMED else ""
    num_rows = math.ceil(min(sum(not line.is_member for line in drawn), MAX_LABELS + 1) / 2)

    def draw(figure: FigureBase) -> None:
        inside = [line for line in drawn if not _is_far(line, drawn, below=hides_below, above=hides_above)] or drawn
        ends = limits([y for line in inside for y in _heights(line)] + [0.0] * has_zero)
        drawn_on = _prepared(figure, axes, xs, ends, has_zero=has_zero, is_log=is_log)
        _draw_lines(drawn_on, drawn, ends)
        if names_points:
            _name_points(drawn_on, drawn)
        elif len(drawn) > 1:
            figure.legend(loc="outside upper left", ncols=2)

    return [
        Chart(
            name=name,
            title=title,
            caption=caption,
            alt=f"{title}. {y_label} against {x_label}. At {x_label} {plain(xs[-1])}: {last}{more}.",
            numbers=([x_label, *(line.name for line in drawn)], rows),
            draw=draw,
            height=HEIGHT + LEGEND_HEIGHT * num_rows * (len(drawn) > 1 and not names_points),
        )
    ]


def _prepared(
    figure: FigureBase,
    labels: tuple[str, str],
    xs: Sequence[float],
    ends: tuple[float, float],
    *,
    has_zero: bool,
    is_log: bool,
) -> Axes:
    """Axes with their ranges, ticks and labels."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes = figure.add_subplot()
    axes.set(xlabel=clean(labels[0]), title=clean(labels[1]), ylim=ends)
    axes.grid(axis="y")
    if is_log:
        axes.set(xscale="log", xlim=(xs[0] / 1.3, xs[-1] * 1.3))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(limits(xs, 0.01))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=all(x == round(x) for x in xs)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.6g}")
    if has_zero:
        axes.axhline(0.0, color=LIGHT["quiet"], linewidth=1, linestyle=(0, (2, 2)))
    return axes


def _draw_lines(axes: Axes, lines: Sequence[Line], ends: tuple[float, float]) -> None:
    """Draw lines; those that are not members, up to a number, have labels."""
    labelled = [line for line in lines if not line.is_member]
    for place, line in enumerate(lines):
        same = sum(other.color == line.color for other in lines[:place] if not line.is_member)
        look: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.45} if line.is_member else {"linewidth": 1.8}
        look |= {"marker": "o", "markersize": 3.5} if len(line.points) < 3 else {}
        last = line.points[-1][1]
        edge = "" if ends[0] <= last <= ends[1] else f" {'↓' if last < ends[0] else '↑'} {plain(last)}"
        if line in labelled[:MAX_LABELS]:
            look["label"] = shortened(line.name, 26) + edge
        if line.band:
            xs, lows, highs = zip(*evenly_spaced(line.band, MAX_BAND_POINTS), strict=True)
            axes.fill_between(xs, lows, highs, color=LIGHT[line.color], alpha=0.12, linewidth=0)
        axes.plot(
            *zip(*line.points, strict=True), color=LIGHT[line.color], linestyle=DASHES[same % len(DASHES)], **look
        )
    if len(labelled) > MAX_LABELS:
        axes.plot([], [], linestyle="", label=f"and {len(labelled) - MAX_LABELS} more")


def _name_points(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each name above or below its point, right or left of it, where no other name is."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.figure.draw_without_rendering()  # now the layout is known
    points = [Bbox([place - 4, place + 4]) for place in (axes.transData.transform(line.points[-1]) for line in lines)]
    names: list[Any] = []
    for line in lines:
        text = axes.annotate(shortened(line.name, 26), line.points[-1], (4, 4), textcoords="offset points", fontsize=8)

        def overlaps(place: tuple[tuple[int, int], str], text: Any = text) -> tuple[int, int]:
            text.set(position=place[0], horizontalalignment=place[1])
            box = text.get_window_extent()
            return sum(map(box.overlaps, names)), sum(map(box.overlaps, points))

        overlaps(min((((4, 4), "left"), ((4, -10), "left"), ((-4, 4), "right"), ((-4, -10), "right")), key=overlaps))
        names.append(text.get_window_extent())


def _is_far(line: Line, lines: Sequence[Line], *, below: bool, above: bool) -> bool:
    """Whether a line stays so far from all others that it would flatten them."""
    others = [y for other in lines if other is not line for y in _heights(other)]
    if line.is_member or not others:
        return False
    low, high = limits(others)
    reach, own = high - low, _heights(line)
    return (below and max(own) < low - reach) or (above and min(own) > high + reach)


def _heights(line: Line) -> list[float]:
    return [y for _, y in line.points] + [y for _, *ends in line.band for y in ends]


def limits(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """A range a little wider than the values, never empty."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    space = (high - low) * margin if high - low > 1e-9 * size else 0.05 * size or 0.5
    return low - space, high + space


def svg(chart: Chart, first: str = "", *, has_title: bool = False) -> str:
    """A figure as an `<svg>` element for a page, in the page's colors and font; `first` are its first elements."""
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn = _rendered(chart, "svg", has_title=has_title, metadata=metadata).decode()
    box = re.search(r'viewBox="([^"]+)"', drawn)
    assert box is not None
    body = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", drawn[drawn.index(">", box.end()) + 1 :], flags=re.S)
    used = set(re.findall(r"#([\w-]+)[\")]", body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    for name, color in LIGHT.items():
        body = body.replace(color, f"var(--{name})")
    body = re.sub(r"\n\s*", "\n", body).replace("xlink:href", "href").replace("'DejaVu Sans'", FONTS)
    title, alt = html.escape(printable(chart.title)), html.escape(printable(chart.alt), quote=True)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{alt}"><title>{title}</title>{first}{body.strip()}'


def standalone_svg(chart: Chart) -> str:
    """A figure as an SVG file with title and background, light or dark as the reader prefers."""
    variables = [" ".join(f"--{name}: {color};" for name, color in palette.items()) for palette in (LIGHT, DARK)]
    style = f"svg {{ {variables[0]} }} {SVG_STYLE} @media (prefers-color-scheme: dark) {{ svg {{ {variables[1]} }} }}"
    first = f'<style>{style}</style><rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>'
    drawn = svg(chart, first, has_title=True)
    return printable(drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="640" ', 1)) + "\n"


def pdf_bytes(chart: Chart) -> bytes:
    """A figure as a PDF page, with text as text."""
    return _rendered(chart, "pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})


def _rendered(chart: Chart, file_format: str, *, has_title: bool = False, **options: Any) -> bytes:
    require("matplotlib")
    from matplotlib import style
    from matplotlib.figure import Figure

    # A salt per figure keeps the ids in one page apart, and the same in each rendering.
    with style.context(["default", {**STYLE, "svg.hashsalt": chart.name}]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font has no glyph for
        size = (WIDTH / 72, (chart.height + TITLE_HEIGHT * has_title) / 72)
        whole = Figure(figsize=size, layout="constrained")
        if has_title:
            parts: Any = whole.subfigures(2, height_ratios=[TITLE_HEIGHT, chart.height])
            parts[0].text(0.02, 0.3, clean(chart.title), size=min(11.0, 560 / len(chart.title)), weight="bold")
        chart.draw(parts[1] if has_title else whole)
        file = io.BytesIO()
        whole.savefig(file, format=file_format, **options)
    return file.getvalue()


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


def shortened(label: str, most: int) -> str:
    """A label on one line; of a long one the beginning and, since that is where names differ, more of the end.

    Example:
        >>> shortened("papa, average.half_life 0.003", 20)
        'papa, …lf_life 0.003'
    """
    words = clean(label)
    return words if len(words) <= most else f"{words[: most // 3]}…{words[most // 3 + 1 - most :]}"


def clean(words: str) -> str:
    """Text that can be drawn: without control characters and line breaks."""
    return " ".join(printable(words).split())
