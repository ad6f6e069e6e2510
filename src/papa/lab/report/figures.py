"""The plots of a run and of a comparison: each is made if its numbers were logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from papa.lab.config import NEVER_AVERAGED
from papa.lab.report.draw import SERIES_COLORS
from papa.lab.report.metric import Metric, metric_of
from papa.lab.report.plot import AnyPlot, DotPlot, Line, LinePlot, Point, points
from papa.lab.report.strength import strength_figures
from papa.lab.report.table import KEYS, Settings, runs_by_setting, scores_of

Event = Mapping[str, Any]
Value = str | Callable[[Event], float | None]
"""A number of an event, by its key or a function."""
MERGE_NAMES = {"before": "before", "after_unrepaired": "after, no REPAIR", "after": "after", "later": "later"}
"""When members are scored around a merge, by the key of the event."""
FIGURE_2 = "The mean of members compared with just before the merge (the paper's Figure 2)."


def run_figures(result: Mapping[str, Any], events: Sequence[Event]) -> dict[str, list[AnyPlot]]:
    """The plots of one run, by the section of its page."""
    epochs, merges, averagings = (_of_kind(events, kind) for kind in ("epoch", "merge", "average"))
    metric = metric_of([result])
    return {
        "training": [*_training(epochs, metric), *_around_averagings(averagings)],
        "strength": strength_figures(epochs, averagings, metric) if result["method"] not in NEVER_AVERAGED else [],
        "merges": _merges(merges, metric),
        "greedy": _greedy(result, metric),
        "similarity": _similarity(result),
        "interpolation": _interpolation(result, metric),
        "communication": _plot(
            *("seconds-per-averaging", "Time of each averaging", "Includes waiting for other processes."),
            *(("step", "seconds"), [Line("seconds", _curve(averagings, "seconds", x="step"), "c0")]),
        ),
    }


def compare_figures(
    results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Event]] = ()
) -> dict[str, list[AnyPlot]]:
    """The plots that compare methods, by the section of the page; curves need the events of each run."""
    story = members_to_soup(results)
    curves = _method_curves(runs_by_setting(results), metrics, metric_of(results)) if metrics else []
    return {"scores": [story] if story else [], "curves": curves}


def members_to_soup(results: Sequence[Mapping[str, Any]], title: str = "From single networks to one") -> DotPlot | None:
    """For each method a line from its members' mean to their ensemble, with both soups; independent members first."""
    settings = runs_by_setting(results)
    rows = {}
    for label in sorted(settings, key=lambda label: not _is_independent(settings[label])):
        row = {
            name: values
            for key, name in KEYS.items()
            if (values := [v for _, run in settings[label] if (v := scores_of(run).get(key)) is not None])
        }
        if row:
            rows[label] = row
    if not rows:
        return None
    reference = next((label for label in rows if _is_independent(settings[label])), None)
    has_seeds = any(len(values) > 1 for row in rows.values() for values in row.values())
    return DotPlot(
        name="members-to-soup",
        title=title,
        caption="Each line leads from the mean of single networks to their ensemble. A soup is one network: the "
        "average of all (average soup) or of some (greedy soup)."
        + " Small marks are single seeds." * has_seeds
        + " The shaded range is that of independent networks." * bool(reference),
        x_label=_on_data(metric_of(results), data_of(results)),
        digits=metric_of(results).digits - 1,
        rows=rows,
        colors=_colors(settings),
        connect=(KEYS["mean"], KEYS["ensemble"]),
        reference=reference,
        value_series=KEYS["average_soup"],
    )


def _on_data(metric: Metric, data: str) -> str:
    return f"{metric.name} on {data} data{f', {metric.unit}' if metric.unit else ''}"


def _capital(metric: Metric) -> str:
    return metric.name[:1].upper() + metric.name[1:]


def data_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Which data the scores of some runs are from: test, validation, or both."""
    kinds = ["test" if one.get("test") else "validation" for one in results if scores_of(one)]
    return " or ".join(dict.fromkeys(kinds)) or "test"


def _is_independent(runs: Sequence[tuple[int, Mapping[str, Any]]]) -> bool:
    return runs[0][1].get("method") == "independent"


def _colors(settings: Settings) -> dict[str, str]:
    """One color per setting, the same on all plots of a page; independent members have the color of text."""
    others = [label for label, runs in settings.items() if not _is_independent(runs)]
    colors = {label: SERIES_COLORS[place % len(SERIES_COLORS)] for place, label in enumerate(others)}
    return {label: colors.get(label, "ink") for label in settings}


def _plot(
    name: str, title: str, caption: str, axes: tuple[str, str], lines: Iterable[Line], **options: bool
) -> list[AnyPlot]:
    """A plot of the lines that have points; none if there is none."""
    drawn, (x, y) = [line for line in lines if line.points], axes
    plot = LinePlot(name=name, title=title, caption=caption, x_label=x, y_label=y, lines=drawn, **options)
    return [plot] if drawn else []


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
    return Line(name, _curve(events, partial(_mean_of, key)), color, band=band)


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


def _training(epochs: Sequence[Event], metric: Metric) -> list[AnyPlot]:
    plots = []
    for data in ("validation", "test"):
        soups = (("ensemble", "c0"), ("average soup", "c1"))
        plots += _plot(
            f"{data}-score",
            f"{_capital(metric)} on {data} data",
            "After each epoch: each member, their mean, and, if logged, their ensemble and their average soup.",
            ("epoch", metric.label),
            [
                *_members(epochs, data),
                *(Line(name, _curve(epochs, f"{data}_{name.replace(' ', '_')}"), color) for name, color in soups),
            ],
            hides_far=True,
        )
    loss = "Each member's mean loss over the epoch, on its own augmented data."
    distance = (
        "Euclidean distance of each member's weights to the mean of all. If it stays large, the average soup cannot be "
        "good."
    )
    plots += _plot("training-loss", "Training loss", loss, ("epoch", "loss"), _members(epochs, "losses"))
    words = ("distance-to-mean", "Distance of members to their mean", distance)
    return plots + _plot(*words, ("epoch", "distance"), _members(epochs, "distances"))


def _around_averagings(averagings: Sequence[Event]) -> list[AnyPlot]:
    colors = {"before": "c0", "after": "c1"}
    lines = [Line(when, _curve(averagings, f"distance_{when}", x="step"), color) for when, color in colors.items()]
    caption = "Training moves members apart, averaging brings them back together."
    title = "Mean distance before and after each averaging"
    return _plot("distance-around-averaging", title, caption, ("step", "distance"), lines)


def _merges(merges: Sequence[Event], metric: Metric) -> list[AnyPlot]:
    """Members' scores around each merge, and the change."""
    steps = next((count for event in merges if (count := event.get("steps_later")) is not None), None)
    later = {} if steps is None else {"later": f"{steps:.0f} step{'s' * (steps != 1)} later"}
    names = {**MERGE_NAMES, **later}
    colors = dict(zip(names, ("quiet", "c3", "c0", "c1"), strict=True))
    data = next((event["data"] for event in merges if "data" in event), "test")
    scores = _plot(
        "score-around-merges",
        f"{_capital(metric)} on {data} data around each merge",
        "The mean of members, and the range from the worst to the best of them.",
        ("epoch", metric.label),
        [_mean_line(name, merges, key, colors[key]) for key, name in names.items()],
    )
    changes = [Line(names[key], _curve(merges, partial(_change, key)), colors[key]) for key in list(names)[1:]]
    axes = ("epoch", metric.change_label)
    title = f"Change of {metric.name} by each merge"
    return scores + _plot("change-by-merging", title, FIGURE_2, axes, changes, has_zero=True)


def _greedy(result: Mapping[str, Any], metric: Metric) -> list[AnyPlot]:
    trials = [trial for trial in result.get("greedy_trials") or () if trial["members"] and trial["score"] is not None]
    if not trials:
        return []
    return [
        DotPlot(
            name="greedy-soup",
            title="Steps of the greedy soup",
            caption=f"The soup starts with the best member, {trials[0]['members'][0]}. Members are tried from best to "
            "worst, and kept if the score does not get worse.",
            x_label=_on_data(metric, "validation"),
            rows={
                f"+ member {trial['members'][-1]}": {"kept" if trial["kept"] else "left out": [trial["score"]]}
                for trial in trials
            },
        )
    ]


def _similarity(result: Mapping[str, Any]) -> list[AnyPlot]:
    found = result.get("similarity") or {"layers": (), "members": (), "soup": ()}
    rows: dict[str, dict[str, list[float]]] = {}
    for layer, *pair in zip(found["layers"], found["members"], found["soup"], strict=False):
        series = zip(("two members", "member and soup"), pair, strict=True)
        if row := {name: [value] for name, value in series if value is not None}:
            rows[layer] = row
    plot = DotPlot(
        name="similarity",
        title="Similarity of features, layer by layer",
        caption="Mean cosine similarity of a layer's outputs for the same inputs; 1 means the same direction.",
        x_label="cosine similarity",
        rows=rows,
    )
    return [plot] if rows else []


def _interpolation(result: Mapping[str, Any], metric: Metric) -> list[AnyPlot]:
    found = result.get("interpolation") or {"pair": (), "curves": ()}
    between = f" between members {' and '.join(map(str, found['pair']))}"
    caption = "Networks on the straight line from one member to the other. Without a barrier the line is flat."
    plots: list[AnyPlot] = []
    for key, title, y_label in (("score", _capital(metric), metric.label), ("loss", "Loss", "loss")):
        lines = [
            Line(
                curve["name"],
                points(zip(curve["coefficients"], curve[key], strict=False)),
                SERIES_COLORS[place % len(SERIES_COLORS)],
            )
            for place, curve in enumerate(found["curves"])
        ]
        axes = ("interpolation coefficient", y_label)
        plots += _plot(f"interpolation-{key}", f"{title}{between}", caption, axes, lines)
    return plots


def _method_curves(settings: Settings, metrics: Sequence[Sequence[Event]], metric: Metric) -> list[AnyPlot]:
    """One line per method: means over its runs, at each epoch and around each merge."""
    colors = _colors(settings)
    over_seeds = "The mean over the runs of a method, and the range over its seeds."

    def lines(kind: str, value: Value) -> list[Line]:
        found = []
        for label, runs in settings.items():
            by_epoch: dict[float, list[float]] = {}
            for index, _ in runs:
                for epoch, number in _curve(_of_kind(metrics[index], kind), value):
                    by_epoch.setdefault(epoch, []).append(number)
            ordered = sorted(by_epoch.items())
            band = [(epoch, min(values), max(values)) for epoch, values in ordered] if len(runs) > 1 else []
            found.append(Line(label, [(epoch, fmean(v)) for epoch, v in ordered], colors[label], band=band))
        return found

    plots = []
    for data in ("validation", "test"):
        values: dict[str, Value] = {
            "Average soup": f"{data}_average_soup",
            "Ensemble": f"{data}_ensemble",
            "Mean of members": partial(_mean_of, data),
        }
        for name, (title, value) in zip(("average-soup", "ensemble", "members"), values.items(), strict=True):
            words = (f"compare-{data}-{name}", f"{title} on {data} data", over_seeds)
            plots += _plot(*words, ("epoch", metric.label), lines("epoch", value), hides_far=True)
    for key, name, title, y_label in (
        ("losses", "training-loss", "Training loss of members", "loss"),
        ("distances", "distance-to-mean", "Distance of members to their mean", "distance"),
    ):
        curves = lines("epoch", partial(_mean_of, key))
        plots += _plot(f"compare-{name}", title, over_seeds, ("epoch", y_label), curves)
    for key, name in list(MERGE_NAMES.items())[1:]:
        words = (f"compare-change-{key.replace('_', '-')}", f"Change by each merge: {name}", f"{FIGURE_2} {over_seeds}")
        axes = ("epoch", metric.change_label)
        plots += _plot(*words, axes, lines("merge", partial(_change, key)), has_zero=True)
    return plots
