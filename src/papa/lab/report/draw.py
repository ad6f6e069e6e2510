"""Drawing plots with matplotlib: SVG for pages, PNG and PDF for papers."""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from papa.lab.report.plot import AnyPlot, DotPlot, Line, LinePlot, evenly_spaced
from papa.lab.report.words import plain, printable
from papa.packages import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    **{"xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False, "legend.fontsize": 8.5},
    **{"legend.handletextpad": 0.1, "legend.columnspacing": 1.2, "legend.borderpad": 0.2},
    **{"lines.solid_capstyle": "round", "axes.axisbelow": True},
}
WIDTH, LINE_HEIGHT = 380.0, 235.0
"""Size in points. Text has 10 points, so that a plot is readable on a phone and twice as wide on a desktop."""
ROW_HEIGHT, VALUE_ROW_HEIGHT, AROUND_ROWS, TITLE_HEIGHT = 22.0, 38.0, 80.0, 26.0
MAX_BAND_POINTS, MAX_ROWS, MAX_LABELS, MAX_CHARACTERS = 400, 60, 12, 26
MARKERS = ("o", "D", "^", "s", "X", "v")
CONNECTED_MARKS: tuple[tuple[Any, float, dict[str, Any]], ...] = (
    ("o", 0.0, {"markersize": 7, "markerfacecolor": LIGHT["paper"], "markeredgewidth": 1.8}),
    ("|", 0.0, {"markersize": 13, "markeredgewidth": 3}),
    (7, -0.1, {"markersize": 9}),
    (6, 0.1, {"markersize": 6, "markeredgewidth": 0}),
)
"""Marker, vertical offset and look: 7 and 6 are triangles that point down and up to the value."""
STEPS = [1, 2, 5, 10]
"""Ticks are these numbers times a power of ten apart."""
TITLE_FONT: dict[str, Any] = {"size": 11.0, "weight": "bold"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
LABEL_GAP = 0.075
"""The least distance between two labels, as a share of the axes' height."""


def standalone_svg(plot: AnyPlot) -> str:
    """A plot as an SVG file with title and background, light or dark as the reader prefers."""
    variables = [" ".join(f"--{name}: {color};" for name, color in palette.items()) for palette in (LIGHT, DARK)]
    style = f"svg {{ {variables[0]} }} {SVG_STYLE} @media (prefers-color-scheme: dark) {{ svg {{ {variables[1]} }} }}"
    first = f'<style>{style}</style><rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>'
    drawn = svg(plot, first, has_title=True)
    return printable(drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="640" ', 1)) + "\n"


def png_bytes(plot: AnyPlot, *, dpi: int = 200) -> bytes:
    """A plot as a PNG image on white."""
    return _rendered(plot, "png", facecolor="white", dpi=dpi, metadata={"Software": None})


def pdf_bytes(plot: AnyPlot) -> bytes:
    """A plot as a PDF page, with text as text."""
    return _rendered(plot, "pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})


def svg(plot: AnyPlot, first: str = "", *, has_title: bool = False) -> str:
    """A plot as an `<svg>` element for a page, in the page's colors and font; `first` are its first elements."""
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn = _rendered(plot, "svg", has_title=has_title, metadata=metadata).decode()
    box = re.search(r'viewBox="([^"]+)"', drawn)
    assert box is not None
    body = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", drawn[drawn.index(">", box.end()) + 1 :], flags=re.S)
    used = set(re.findall(r"#([\w-]+)[\")]", body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    for name, color in LIGHT.items():
        body = body.replace(color, f"var(--{name})")
    body = re.sub(r"\n\s*", "\n", body).replace("xlink:href", "href").replace("'DejaVu Sans'", FONTS)
    title, alt = html.escape(printable(plot.title)), html.escape(printable(plot.alt), quote=True)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{alt}"><title>{title}</title>{first}{body.strip()}'


def _rendered(plot: AnyPlot, file_format: str, *, has_title: bool = False, **options: Any) -> bytes:
    require("matplotlib")
    from matplotlib import style
    from matplotlib.figure import Figure

    # A salt per plot keeps the ids in one page apart, and the same in each rendering.
    with style.context(["default", {**STYLE, "svg.hashsalt": plot.name}]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font has no glyph for
        rows = min(len(plot.rows), MAX_ROWS) if isinstance(plot, DotPlot) else 0
        row_height = VALUE_ROW_HEIGHT if isinstance(plot, DotPlot) and plot.value_series else ROW_HEIGHT
        height = (AROUND_ROWS + row_height * rows if rows else LINE_HEIGHT) + TITLE_HEIGHT * has_title
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        draw_on(figure, plot, title=_clean(plot.title) if has_title else None)
        file = io.BytesIO()
        figure.savefig(file, format=file_format, **options)
    return file.getvalue()


def draw_on(figure: Figure, plot: AnyPlot, title: str | None = None) -> None:
    """Draw a plot on an empty matplotlib figure, with a title if given."""
    axes = figure.add_subplot()
    axes.set_xlabel(_clean(plot.x_label))
    if isinstance(plot, LinePlot):
        _draw_lines(axes, plot)
        if title:
            figure.suptitle(title, x=0.02, ha="left", **TITLE_FONT)
    else:
        _draw_dots(axes, plot)
        # The title belongs to the legend, since matplotlib's layout would put both at the same place.
        legend = figure.legend(loc="outside upper left", ncols=4, title=title, title_fontproperties=TITLE_FONT)
        legend.set_alignment("left")


def _draw_lines(axes: Axes, plot: LinePlot) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.set_title(_clean(plot.y_label), loc="left", fontsize=10, color=LIGHT["quiet"])
    axes.grid(axis="y")
    labelled = [line for line in plot.lines if not line.is_member]
    inside = [line for line in plot.lines if not (plot.hides_far and _is_far(line, plot))] or list(plot.lines)
    low, high = _limits([y for line in inside for y in _heights(line)] + [0.0] * plot.has_zero)
    xs = [x for line in plot.lines for x, _ in line.points]
    axes.set_ylim(low, high)
    if plot.is_log:
        axes.set(xscale="log", xlim=(min(xs) / 1.3, max(xs) * 1.3))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(_limits(xs, 0.01))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=all(x == round(x) for x in xs)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.6g}")
    if plot.has_zero:
        axes.axhline(0.0, color=LIGHT["quiet"], linewidth=1, linestyle=(0, (2, 2)))
    for place, line in enumerate(plot.lines):
        # Lines of the same color, as there are in comparisons of many methods, differ in their dashes.
        same = sum(other.color == line.color for other in plot.lines[:place] if not line.is_member)
        _draw_line(axes, line, DASHES[same % len(DASHES)])
    if plot.names_points:
        _name_points(axes, labelled)
        return
    shown = labelled[:MAX_LABELS]
    wanted = [min(1.0, max(0.0, (line.points[-1][1] - low) / (high - low))) for line in shown]
    for line, height in zip(shown, _apart(wanted, LABEL_GAP), strict=True):
        last = line.points[-1][1]
        edge = f" {'↓' if last < low else '↑'} {plain(last)}" if not low <= last <= high else ""
        _beside(axes, height, _shortened(line.name) + edge, LIGHT[line.color])
    if len(labelled) > MAX_LABELS:
        _beside(axes, 1 + LABEL_GAP, f"and {len(labelled) - MAX_LABELS} more", LIGHT["quiet"])


def _name_points(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each name above or below its point, right or left of it, where no other name is."""
    taken: list[Any] = []
    for line in lines:
        text = axes.annotate(_shortened(line.name), line.points[-1], (4, 4), textcoords="offset points", fontsize=8)
        for offset, side in (((4, 4), "left"), ((4, -10), "left"), ((-4, 4), "right"), ((-4, -10), "right")):
            text.set(position=offset, horizontalalignment=side)
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _draw_line(axes: Axes, line: Line, dashes: Any) -> None:
    color = LIGHT[line.color]
    if line.band:
        xs, lows, highs = zip(*evenly_spaced(line.band, MAX_BAND_POINTS), strict=True)
        axes.fill_between(xs, lows, highs, color=color, alpha=0.12, linewidth=0)
    look: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.45} if line.is_member else {"linewidth": 1.8}
    look |= {"marker": "o", "markersize": 3.5} if len(line.points) < 3 else {}
    axes.plot(*zip(*line.points, strict=True), color=color, linestyle=dashes, **look)


def _beside(axes: Axes, height: float, words: str, color: str) -> None:
    """Write words to the right of the axes."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(words, (1.0, height), (5, 0), va="center", fontsize=9, color=color, annotation_clip=False, **place)


def _is_far(line: Line, plot: LinePlot) -> bool:
    """Whether a line stays so far below all others that it would flatten them, as a collapsed soup does."""
    others = [y for other in plot.lines if other is not line for y in _heights(other)]
    if line.is_member or not others:
        return False
    low, high = _limits(others)
    return all(y < low - (high - low) for y in _heights(line))


def _heights(line: Line) -> list[float]:
    return [y for _, y in line.points] + [y for _, *ends in line.band for y in ends]


def _draw_dots(axes: Axes, plot: DotPlot) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = evenly_spaced(list(plot.rows.items()), MAX_ROWS)
    limits = _limits(_without_outliers([value for _, row in rows for values in row.values() for value in values]), 0.06)
    axes.set(xlim=limits, ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [_shortened(label) for label, _ in rows])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    axes.grid(axis="x")
    reference = plot.rows.get(plot.reference or "", {})
    if plot.connect and all(name in reference for name in plot.connect):
        axes.axvspan(*(fmean(reference[name]) for name in plot.connect), color=LIGHT["quiet"], alpha=0.1, linewidth=0)
    for place, (tick, (label, row)) in enumerate(zip(axes.get_yticklabels(), rows, strict=True)):
        if label in plot.colors:
            tick.set(color=LIGHT[plot.colors[label]], fontweight="bold")
        _draw_row(axes, plot, place, row, plot.colors.get(label))
    for index, name in enumerate(plot.series):
        marker, _, look = _mark(plot, index)
        color = LIGHT["quiet" if plot.colors else SERIES_COLORS[index % len(SERIES_COLORS)]]
        axes.plot([], [], color=color, **{"linestyle": "", "marker": marker, "label": _shortened(name), **look})
    if plot.value_series:
        _write(axes, plot.value_series.replace(" ", "\n"), (1.03, -0.5), LIGHT["quiet"], va="bottom")


def _mark(plot: DotPlot, index: int) -> tuple[Any, float, dict[str, Any]]:
    """Marker, vertical offset and look of a series.

    In a plot with connected series, the other ones point to the line from above and below, so that marks with nearly
    the same value do not hide each other.
    """
    if plot.connect:
        return CONNECTED_MARKS[index % len(CONNECTED_MARKS)]
    return MARKERS[index % len(MARKERS)], 0.0, {"markersize": 7}


def _draw_row(axes: Axes, plot: DotPlot, place: int, row: Mapping[str, Sequence[float]], row_color: str | None) -> None:
    low, high = axes.get_xlim()
    means = {name: fmean(values) for name, values in row.items()}
    if plot.connect and all(name in means for name in plot.connect):
        ends = [means[name] for name in plot.connect]
        axes.plot(ends, [place, place], color=LIGHT[row_color or "quiet"], linewidth=3, alpha=0.4)
    for index, name in reversed(list(enumerate(plot.series))):
        marker, offset, look = _mark(plot, index)
        height, values = place + offset, row.get(name, ())
        mark = {"color": LIGHT[row_color or SERIES_COLORS[index % len(SERIES_COLORS)]], "marker": marker, **look}
        if len(values) > 1:
            singles = [value for value in values if low <= value <= high]
            small = {"markersize": 0.55 * look["markersize"], "alpha": 0.45, "linestyle": ""}
            axes.plot(singles, [height] * len(singles), **{**mark, **small})
        if values and low <= means[name] <= high:
            axes.plot([means[name]], [height], **mark)
        elif values:
            words, x, align = ("◂ {}", 0.01, "left") if means[name] < low else ("{} ▸", 0.99, "right")
            color, away = LIGHT[row_color or "ink"], 2.2 * offset or -0.24  # the line of the row would cross the words
            _write(axes, words.format(f"{name} {means[name]:.{plot.digits}f}"), (x, place + away), color, ha=align)
    if plot.value_series in means:
        color = LIGHT[row_color or "ink"]
        _write(
            axes, f"{means[plot.value_series]:.{plot.digits}f}", (1.03, place), color, fontsize=10, fontweight="bold"
        )


def _write(axes: Axes, words: str, place: tuple[float, float], color: str, **look: Any) -> None:
    """Write words at a share of the width and the height of a row."""
    look = {"va": "center", "fontsize": 8.5, "color": color, "annotation_clip": False, **look}
    axes.annotate(words, place, xycoords=("axes fraction", "data"), **look)


def _without_outliers(values: list[float]) -> list[float]:
    """The values within three interquartile ranges of the middle half (Tukey's outer fences)."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    reach = 3 * (high - low)
    return [value for value in ordered if low - reach <= value <= high + reach] if reach else ordered


def _limits(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """A range a little wider than the values, never empty."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    space = (high - low) * margin if high - low > 1e-9 * size else 0.05 * size or 0.5
    return low - space, high + space


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights as near to the wanted ones as possible, at least `gap` apart, in the same order."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = []
    for index in order:
        placed.append(max(wanted[index], placed[-1] + gap) if placed else wanted[index])
    ceiling = 1.0
    for rank in reversed(range(len(placed))):
        placed[rank] = min(placed[rank], ceiling)
        ceiling = placed[rank] - gap
    return [placed[order.index(index)] for index in range(len(wanted))]


def _shortened(label: str) -> str:
    """A label on at most two short lines; of a long word the end, since names of layers differ there."""
    lines = [
        line if len(line) <= MAX_CHARACTERS else "…" + line[1 - MAX_CHARACTERS :]
        for line in textwrap.wrap(_clean(label), MAX_CHARACTERS, break_long_words=False, max_lines=2, placeholder=" …")
    ]
    return "\n".join(lines)


def _clean(words: str) -> str:
    return " ".join(printable(words).split())


RENDERERS: dict[str, Callable[[AnyPlot], bytes]] = {"png": png_bytes, "pdf": pdf_bytes}
"""How a plot becomes a file, by the file's ending."""
