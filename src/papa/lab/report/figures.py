"""The figures of a run and of a comparison: each is made if its numbers were logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import numpy

from papa.lab.config import NEVER_AVERAGED, flat
from papa.lab.report.draw import (
    LIGHT,
    SERIES_COLORS,
    Chart,
    Line,
    Point,
    clean,
    evenly_spaced,
    limits,
    line_chart,
    points,
    shortened,
)
from papa.lab.report.metric import Metric, metric_of
from papa.lab.report.table import KEYS, Settings, data_of, is_independent, runs_by_setting, scores_of
from papa.lab.report.words import plain

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

Event = Mapping[str, Any]
Value = str | Callable[[Event], float | None]
"""A number of an event, by its key or a function."""
MERGE_NAMES = {"after_unrepaired": "after, no REPAIR", "after": "after", "later": "later"}
"""When members are scored after a merge, by the key of the event."""
FIGURE_2 = "The mean of members compared with just before the merge (the paper's Figure 2)."
MAX_ROWS, ROW_HEIGHT, AROUND_ROWS = 60, 42.0, 78.0
MARKS: dict[str, tuple[Any, float, dict[str, Any]]] = {
    KEYS["mean"]: ("o", 0.0, {"markersize": 7, "markerfacecolor": LIGHT["paper"], "markeredgewidth": 1.8}),
    KEYS["ensemble"]: ("|", 0.0, {"markersize": 13, "markeredgewidth": 3}),
    KEYS["average_soup"]: (7, -0.08, {"markersize": 9}),
    KEYS["greedy_soup"]: (6, 0.08, {"markersize": 6, "markeredgewidth": 0}),
}
"""Marker, vertical offset and look. 7 and 6 are triangles that point down and up to the value: marks with nearly the
same value do not hide each other."""
MAX_OF_MEDIAN = 5.0
"""The longest half-life that is drawn, in medians of all."""


def run_figures(result: Mapping[str, Any], events: Sequence[Event]) -> dict[str, list[Chart]]:
    """The figures of one run, by the section of its page."""
    epochs, merges, averagings = (_of_kind(events, kind) for kind in ("epoch", "merge", "average"))
    metric = metric_of([result])
    return {
        "training": _training(epochs, metric),
        "strength": strength_figures(epochs, averagings, metric) if result["method"] not in NEVER_AVERAGED else [],
        "merges": _merges(merges, metric),
        "similarity": _similarity(result),
        "interpolation": _interpolation(result, metric),
    }


def compare_figures(
    results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Event]] = ()
) -> dict[str, list[Chart]]:
    """The figures that compare methods, by the section of the page; curves need the events of each run."""
    story = members_to_soup(results)
    curves = _method_curves(results, metrics) if metrics else []
    return {"scores": [story] if story else [], "curves": curves}


def members_to_soup(results: Sequence[Mapping[str, Any]], title: str = "From single networks to one") -> Chart | None:
    """For each method a line from its members' mean to their ensemble, with both soups; independent members first."""
    settings, metric = runs_by_setting(results), metric_of(results)
    rows: dict[str, dict[str, list[float]]] = {}
    for label in sorted(settings, key=lambda label: not is_independent(settings[label])):
        row = {
            name: values
            for key, name in KEYS.items()
            if (values := [v for _, run in settings[label] if (v := scores_of(run).get(key)) is not None])
        }
        if row:
            rows[label] = row
    if not rows:
        return None
    reference = next((label for label in rows if is_independent(settings[label])), None)
    has_seeds = any(len(values) > 1 for row in rows.values() for values in row.values())
    series = [name for name in MARKS if any(name in row for row in rows.values())]
    x_label = f"{metric.name} on {data_of(results)} data{f', {metric.unit}' if metric.unit else ''}"
    means = [
        f"{label}: {', '.join(f'{name} {plain(fmean(values))}' for name, values in row.items())}"
        for label, row in rows.items()
    ]
    return Chart(
        name="members-to-soup",
        title=title,
        caption="Each line leads from the mean of single networks to their ensemble. A soup is one network: the "
        "average of all (average soup, also as a number) or of some (greedy soup)."
        + " Small marks are single seeds; ± is their standard deviation." * has_seeds
        + " The shaded range is that of independent networks." * bool(reference)
        + " Values far from all others are beyond a break of the axis." * bool(_far_values(rows)),
        alt=f"{title}. {x_label}. {'; '.join(means[:MAX_ROWS])}.",
        numbers=(
            ["", *series],
            [
                [label, *(", ".join(plain(value, 6) for value in row.get(name, ())) for name in series)]
                for label, row in rows.items()
            ],
        ),
        draw=lambda figure: _draw_story(figure, rows, colors_of(settings), reference, x_label, metric.digits - 1),
        height=AROUND_ROWS + ROW_HEIGHT * min(len(rows), MAX_ROWS),
    )


Rows = Mapping[str, Mapping[str, Sequence[float]]]
"""Scores over seeds, by method and what was scored."""


def _draw_story(
    figure: FigureBase, all_rows: Rows, colors: Mapping[str, str], reference: str | None, x_label: str, digits: int
) -> None:
    rows = dict(evenly_spaced(list(all_rows.items()), MAX_ROWS))
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.55), xlabel=clean(x_label), yticks=[])
    place = _scale(axes, rows, digits)
    axes.grid(axis="x")
    shaded = rows.get(reference or "", {})
    if KEYS["mean"] in shaded and KEYS["ensemble"] in shaded:
        low, high = (place(fmean(shaded[KEYS[key]])) for key in ("mean", "ensemble"))
        axes.axvspan(low, high, color=LIGHT["quiet"], alpha=0.1, linewidth=0)
    for height, (label, row) in enumerate(rows.items()):
        color = LIGHT[colors[label]]
        means = {name: fmean(values) for name, values in row.items()}
        named = KEYS["average_soup"] if KEYS["average_soup"] in row else next(iter(row))
        spread = f" ± {stdev(row[named]):.{digits}f}" if len(row[named]) > 1 else ""
        look: dict[str, Any] = {"color": color, "fontsize": 9.5, "fontweight": "bold", "va": "center"}
        look["bbox"] = {"facecolor": LIGHT["paper"], "edgecolor": "none", "alpha": 0.8, "pad": 1}
        sign = "▼" if named == KEYS["average_soup"] else "○"
        axes.text(0.005, height - 0.3, shortened(label, 36), **look)
        axes.text(0.995, height - 0.3, f"{sign} {means[named]:.{digits}f}{spread}", **{**look, "ha": "right"})
        if KEYS["mean"] in means and KEYS["ensemble"] in means:
            ends = [place(means[KEYS[key]]) for key in ("mean", "ensemble")]
            axes.plot(ends, [height + 0.12] * 2, color=color, linewidth=3, alpha=0.4)
        for name, values in reversed(list(row.items())):
            marker, offset, look = MARKS[name]
            mark = {"color": color, "marker": marker, "linestyle": "", "clip_on": False, **look}
            if len(values) > 1:
                small = {**mark, "markersize": 0.55 * look["markersize"], "alpha": 0.45}
                axes.plot([place(value) for value in values], [height + 0.12 + offset] * len(values), **small)
            axes.plot([place(means[name])], [height + 0.12 + offset], **mark)
    for name, (marker, _, look) in MARKS.items():
        if any(name in row for row in rows.values()):
            axes.plot([], [], color=LIGHT["quiet"], linestyle="", marker=marker, label=name, **look)
    figure.legend(loc="outside upper left", ncols=2, handletextpad=0.1)


def _values(rows: Rows) -> list[float]:
    values = [value for row in rows.values() for values in row.values() for value in values]
    return sorted(max(-1e300, min(1e300, value)) for value in values)


def _far_values(rows: Rows) -> list[float]:
    """The lowest or highest values, at most a third of all, beside which all others would fill a fifth of the axis."""
    ordered = _values(rows)
    first, last = 0, len(ordered)
    for place in range(1, len(ordered) // 3 + 1):
        if ordered[place] - ordered[place - 1] > 4 * (ordered[-1] - ordered[place]):
            first = place
    for place in range(1, len(ordered) // 3 + 1):
        if ordered[-place] - ordered[-place - 1] > 4 * (ordered[-place - 1] - ordered[first]):
            last = len(ordered) - place
    return ordered[:first] + ordered[last:]


def _scale(axes: Axes, rows: Rows, digits: int) -> Callable[[float], float]:
    """Set the ticks, and return where a value is drawn, between 0 and 1.

    Far values, such as the score of a collapsed soup, are drawn to scale with each other in a narrow part of the axis
    beyond a break, so that the others can be told apart.
    """
    from matplotlib.ticker import MaxNLocator

    far = _far_values(rows)
    low, high = limits([value for value in _values(rows) if value not in far], 0.04)
    below, above = [value for value in far if value < low], [value for value in far if value > high]
    knots, places = [low, high], [0.2 if below else 0.02, 0.8 if above else 0.98]
    if below:
        knots, places = [below[0], max(below[-1], numpy.nextafter(below[0], low)), *knots], [0.02, 0.1, *places]
    if above:
        knots, places = [*knots, above[0], max(above[-1], numpy.nextafter(above[0], numpy.inf))], [*places, 0.9, 0.98]

    def place(value: float) -> float:
        return float(numpy.interp(value, knots, places))

    ticks: list[tuple[float, str]] = []
    for side, gap in ((below, 0.15), (above, 0.85)):
        if side:
            axes.axvline(gap, color=LIGHT["quiet"], linewidth=1, linestyle=(0, (1, 2)))
            wide_enough = place(side[-1]) - place(side[0]) > 0.075
            ticks += [
                (place(value), f"{value:.{digits}f}") for value in (side[:1] + side[-1:] if wide_enough else side[:1])
            ]
    found = [tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]
    ticks += [(place(tick), f"{tick:.6g}") for tick in found]
    axes.set_xticks([at for at, _ in ticks], [words for _, words in ticks])
    return place


def colors_of(settings: Settings) -> dict[str, str]:
    """One color per setting, the same on all figures of a page; independent members have the color of text."""
    others = [label for label, runs in settings.items() if not is_independent(runs)]
    colors = {label: SERIES_COLORS[place % len(SERIES_COLORS)] for place, label in enumerate(others)}
    return {label: colors.get(label, "ink") for label in settings}


def _of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _curve(events: Sequence[Event], value: Value, x: str = "epoch") -> list[Point]:
    """A number of each event over the epoch or step."""
    find = value if callable(value) else (lambda event: event.get(value))
    return points((event.get(x), find(event)) for event in events)


def _mean_of(key: str, event: Event) -> float | None:
    """The mean over members, if each of them has a number."""
    values = event.get(key)
    return fmean(values) if values and None not in values else None


def _change(key: str, event: Event) -> float | None:
    """The change of the members' mean score since just before a merge."""
    before, after = _mean_of("before", event), _mean_of(key, event)
    return None if before is None or after is None else after - before


def _mean_line(name: str, events: Sequence[Event], key: str, color: str) -> Line:
    """The mean over members, with the range from the lowest to the highest of them."""
    ranges = [(event.get("epoch"), [v for v in event.get(key) or () if v is not None]) for event in events]
    band = [(epoch, min(values), max(values)) for epoch, values in ranges if epoch is not None and values]
    return Line(name, _curve(events, partial(_mean_of, key)), color, band)


def _members(epochs: Sequence[Event], key: str) -> list[Line]:
    """A thin line for each member, and a strong one for their mean."""

    def member_value(member: int, event: Event) -> float | None:
        return dict(enumerate(event.get(key, ()))).get(member)

    size = max((len(event.get(key, ())) for event in epochs), default=0)
    members = [
        Line(f"member {member}", _curve(epochs, partial(member_value, member)), "quiet", is_member=size > 1)
        for member in range(size)
    ]
    return members if size < 2 else [*members, _mean_line("mean of members", epochs, key, "ink")]


def _training(epochs: Sequence[Event], metric: Metric) -> list[Chart]:
    charts = []
    for data in ("validation", "test"):
        soups = (("ensemble", "c0"), ("average soup", "c1"))
        charts += line_chart(
            f"{data}-score",
            f"{metric.name.capitalize()} on {data} data",
            "After each epoch: each member, their mean, and, if logged, their ensemble and their average soup.",
            ("epoch", metric.label),
            [
                *_members(epochs, data),
                *(Line(name, _curve(epochs, f"{data}_{name.replace(' ', '_')}"), color) for name, color in soups),
            ],
            hides_below=metric.higher_is_better,
            hides_above=not metric.higher_is_better,
        )
    loss = "Each member's mean loss over the epoch, on its own augmented data."
    distance = "Euclidean distance of each member's weights to the mean of all. If it stays large, soups are not good."
    charts += line_chart("training-loss", "Training loss", loss, ("epoch", "loss"), _members(epochs, "losses"))
    words = ("distance-to-mean", "Distance of members to their mean", distance)
    return charts + line_chart(*words, ("epoch", "distance"), _members(epochs, "distances"))


def strength_figures(epochs: Sequence[Event], averagings: Sequence[Event], metric: Metric) -> list[Chart]:
    """Half-life and gain over time: how strong averaging is, and what it gains."""
    found = list(_half_lives(averagings))
    # The last half-lives of a schedule that ends at 0 would flatten all others.
    longest = MAX_OF_MEDIAN * median(length for _, length in found) if found else 0.0
    checks = [event for event in averagings if event.get("member_loss") is not None]
    gain = _curve(epochs, partial(_gain, metric))
    losses = {"mean of members": ("member_loss", "ink"), "average": ("average_loss", "c1")}
    return [
        *line_chart(
            "half-life",
            "Half-life of the push",
            "The steps in which pushes halve the distance to the mean. The longer, the weaker the push; a push that "
            "weakens with the learning rate has a longer one, which is not drawn where it is out of scale.",
            ("step", "half-life, steps"),
            [Line("half-life", [(step, length) for step, length in found if length <= longest], "c0")],
        ),
        *line_chart(
            "gain",
            f"Gain of the average: {metric.name} on validation data",
            "The average soup compared with the mean of members, after each epoch; above zero it is better. Far below: "
            "push more strongly. Always at zero: members are nearly one network.",
            ("epoch", f"gain of {metric.name}{', percentage points' if metric.unit == '%' else ''}"),
            [Line("average soup", gain, "c1")],
            has_zero=True,
        ),
        *line_chart(
            "checks",
            "Losses by which the push sets its strength",
            "On a batch of training data at each check: the members' mean, and their average. The push weakens while "
            "the average is better.",
            ("step", "loss"),
            [Line(name, _curve(checks, key, x="step"), color) for name, (key, color) in losses.items()],
        ),
    ]


def _half_lives(averagings: Sequence[Event]) -> Iterator[Point]:
    """From the share of itself a member kept, and the steps since the push before."""
    for before, event in pairwise(averagings):
        alpha, first, step = event.get("alpha"), before.get("step"), event.get("step")
        if alpha is not None and 0.0 < alpha < 1.0 and first is not None and step is not None and step > first:
            yield step, (step - first) * math.log(0.5) / math.log(alpha)


def _gain(metric: Metric, epoch: Event) -> float | None:
    members = [score for score in epoch.get("validation") or () if score is not None]
    soup = epoch.get("validation_average_soup")
    if soup is None or not members:
        return None
    gain: float = soup - fmean(members)
    return gain if metric.higher_is_better else -gain


def _merges(merges: Sequence[Event], metric: Metric) -> list[Chart]:
    """The change of members' scores by each merge."""
    steps = next((count for event in merges if (count := event.get("steps_later")) is not None), None)
    later = {} if steps is None else {"later": f"{steps:.0f} step{'s' * (steps != 1)} later"}
    names = {**MERGE_NAMES, **later}
    colors = dict(zip(names, ("c3", "c0", "c1"), strict=True))
    changes = [Line(name, _curve(merges, partial(_change, key)), colors[key]) for key, name in names.items()]
    data = next((event["data"] for event in merges if "data" in event), "test")
    title = f"Change of {metric.name} on {data} data by each merge"
    return line_chart("change-by-merging", title, FIGURE_2, ("epoch", metric.change_label), changes, has_zero=True)


def _similarity(result: Mapping[str, Any]) -> list[Chart]:
    found = result.get("similarity") or {"layers": (), "members": (), "soup": ()}
    names = {"two members": ("members", "c0"), "member and soup": ("soup", "c1")}
    layers = list(enumerate(found["layers"], start=1))
    lines = [
        Line(name, points((number, value) for (number, _), value in zip(layers, found[key], strict=False)), color)
        for name, (key, color) in names.items()
    ]
    caption = "Mean cosine similarity of a layer's outputs for the same inputs; 1 means the same direction."
    return line_chart(
        *("similarity", "Similarity of features, layer by layer", f"{caption} The table below names the layers."),
        *(("layer", "cosine similarity"), lines),
    )


def _interpolation(result: Mapping[str, Any], metric: Metric) -> list[Chart]:
    found = result.get("interpolation") or {"pair": (), "curves": ()}
    between = f" between members {' and '.join(map(str, found['pair']))}"
    caption = "Networks on the straight line from one member to the other. Without a barrier the line is flat."
    lines = [
        Line(
            curve["name"],
            points(zip(curve["coefficients"], curve["score"], strict=False)),
            SERIES_COLORS[place % len(SERIES_COLORS)],
        )
        for place, curve in enumerate(found["curves"])
    ]
    title, axes = f"{metric.name.capitalize()}{between}", ("interpolation coefficient", metric.label)
    return line_chart("interpolation-score", title, caption, axes, lines)


def _method_curves(results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Event]]) -> list[Chart]:
    """One line per method: means over its runs, at each epoch and around each merge.

    Runs of different length are compared at the same share of training.
    """
    settings, metric = runs_by_setting(results), metric_of(results)
    colors = colors_of(settings)
    over_seeds = "The mean over the runs of a method, and the range over its seeds."
    lengths = [_length(result, events) for result, events in zip(results, metrics, strict=True)]
    is_share = len(set(lengths)) > 1
    x_label = "share of training, %" if is_share else "epoch"

    def lines(kind: str, value: Value) -> list[Line]:
        found = []
        for label, runs in settings.items():
            by_place: dict[float, list[float]] = {}
            for index, _ in runs:
                for epoch, number in _curve(_of_kind(metrics[index], kind), value):
                    by_place.setdefault(100 * epoch / lengths[index] if is_share else epoch, []).append(number)
            ordered = sorted(by_place.items())
            band = [(x, min(values), max(values)) for x, values in ordered] if len(runs) > 1 else []
            found.append(Line(label, [(x, fmean(values)) for x, values in ordered], colors[label], band))
        return found

    charts = []
    for data in ("validation", "test"):
        values: dict[str, tuple[str, Value]] = {
            "average-soup": ("Average soup", f"{data}_average_soup"),
            "members": ("Mean of members", partial(_mean_of, data)),
        }
        for name, (title, value) in values.items():
            words = (f"compare-{data}-{name}", f"{title} on {data} data", over_seeds)
            charts += line_chart(
                *words,
                (x_label, metric.label),
                lines("epoch", value),
                hides_below=metric.higher_is_better,
                hides_above=not metric.higher_is_better,
            )
    for key, name, title, y_label in (
        ("losses", "training-loss", "Training loss of members", "loss"),
        ("distances", "distance-to-mean", "Distance of members to their mean", "distance"),
    ):
        curves = lines("epoch", partial(_mean_of, key))
        charts += line_chart(f"compare-{name}", title, over_seeds, (x_label, y_label), curves)
    for key, name in MERGE_NAMES.items():
        words = (f"compare-change-{key.replace('_', '-')}", f"Change by each merge: {name}", f"{FIGURE_2} {over_seeds}")
        axes = (x_label, metric.change_label)
        charts += line_chart(*words, axes, lines("merge", partial(_change, key)), has_zero=True)
    return charts


def _length(result: Mapping[str, Any], events: Sequence[Event]) -> float:
    """The number of epochs of a whole run, or those that are done if it is not known."""
    epochs: float | None = dict(flat(result.get("config"))).get("train.epochs")
    return epochs or max((event.get("epoch") or 0 for event in events), default=0) or 1
