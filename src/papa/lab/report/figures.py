"""The plots of a run and of a comparison: each is made if its numbers were logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from papa.lab.report.draw import SERIES_COLORS
from papa.lab.report.plot import AnyPlot, DotPlot, Line, LinePlot, Point, points
from papa.lab.report.table import KEYS, Settings, metric_of, runs_by_setting, scores_of

Event = Mapping[str, Any]
MERGE_NAMES = {"before": "before", "after_unrepaired": "after, no REPAIR", "after": "after", "later": "later"}
"""When members are scored around a merge, by the key of the event."""
FIGURE_2 = "The mean of members compared with just before the merge (the paper's Figure 2)."


def run_figures(result: Mapping[str, Any], events: Sequence[Event]) -> dict[str, list[AnyPlot]]:
    """The plots of one run, by the section of its page."""
    epochs, merges = (
        [event for event in events if event["event"] == kind and "epoch" in event] for kind in ("epoch", "merge")
    )
    averagings = [event for event in events if event["event"] == "average"]
    metric = metric_of([result])
    sections: dict[str, list[AnyPlot | None]] = {
        "training": [*_training(epochs, metric), _around_averagings(averagings)],
        "merges": _merges(merges, metric),
        "greedy": [_greedy(result, metric)],
        "similarity": [_similarity(result)],
        "interpolation": _interpolation(result, metric),
        "communication": [_communication(averagings)],
    }
    return {name: [plot for plot in plots if plot is not None] for name, plots in sections.items()}


def compare_figures(
    results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Event]] = ()
) -> dict[str, list[AnyPlot]]:
    """The plots that compare methods, by the section of the page; curves need the events of each run."""
    story = members_to_soup(results)
    curves = _method_curves(runs_by_setting(results), metrics, metric_of(results)) if metrics else []
    return {"scores": [story] if story else [], "curves": [plot for plot in curves if plot is not None]}


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
        x_label=f"{metric_of(results)} on {data_of(results)} data, %",
        rows=rows,
        colors=_colors(settings),
        connect=(KEYS["mean"], KEYS["ensemble"]),
        reference=reference,
        value_series=KEYS["average_soup"],
    )


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
) -> LinePlot | None:
    """A plot of the lines that have points; None if there is none."""
    drawn = [line for line in lines if line.points]
    x, y = axes
    return (
        LinePlot(name=name, title=title, caption=caption, x_label=x, y_label=y, lines=drawn, **options)
        if drawn
        else None
    )


def _training(epochs: Sequence[Event], metric: str) -> list[AnyPlot | None]:
    scores = [
        _plot(
            f"{data}-score",
            f"{metric.capitalize()} on {data} data",
            "After each epoch: each member, their mean, and, if logged, their ensemble and their average soup.",
            ("epoch", f"{metric}, %"),
            [
                *_members(epochs, data),
                Line("ensemble", _curve(epochs, f"{data}_ensemble"), "c0"),
                Line("average soup", _curve(epochs, f"{data}_average_soup"), "c1"),
            ],
            hides_far=True,
        )
        for data in ("validation", "test")
    ]
    loss = "Each member's mean loss over the epoch, on its own augmented data."
    distance = (
        "Euclidean distance of each member's weights to the mean of all. If it stays large, the average soup cannot be "
        "good."
    )
    return [
        *scores,
        _plot("training-loss", "Training loss", loss, ("epoch", "loss"), _members(epochs, "losses")),
        _plot(
            *("distance-to-mean", "Distance of members to their mean", distance, ("epoch", "distance")),
            lines=_members(epochs, "distances"),
        ),
    ]


def _curve(events: Sequence[Event], value_of: str | Callable[[Event], float | None], x: str = "epoch") -> list[Point]:
    """A value of each event, given by its key or a function, over the epoch or step."""
    return points(
        (event.get(x), event.get(value_of) if isinstance(value_of, str) else value_of(event)) for event in events
    )


def _members(epochs: Sequence[Event], key: str) -> list[Line]:
    """A thin line for each member, and a strong one for their mean."""
    size = max((len(event.get(key, ())) for event in epochs), default=0)
    members = [
        Line(f"member {index}", _curve(epochs, partial(_member_value, key, index)), "quiet", is_member=size > 1)
        for index in range(size)
    ]
    return members if size < 2 else [*members, _mean_line("mean of members", epochs, key, "ink")]


def _mean_line(name: str, events: Sequence[Event], key: str, color: str) -> Line:
    """The mean over members, with the range from the lowest to the highest of them."""
    band = []
    for event in events:
        values = [value for value in event.get(key) or () if value is not None]
        if values:
            band.append((event["epoch"], min(values), max(values)))
    return Line(name, _curve(events, partial(_mean_of, key)), color, band=band)


def _member_value(key: str, index: int, event: Event) -> float | None:
    values = event.get(key, ())
    return values[index] if index < len(values) else None


def _mean_of(key: str, event: Event) -> float | None:
    """The mean over members, if each of them has a number."""
    values = event.get(key)
    return fmean(values) if values and None not in values else None


def _change(key: str, event: Event) -> float | None:
    """How much better members are than just before a merge."""
    before, after = _mean_of("before", event), _mean_of(key, event)
    return None if before is None or after is None else after - before


def _around_averagings(averagings: Sequence[Event]) -> LinePlot | None:
    lines = [
        Line(name, _curve(averagings, key, x="step"), color)
        for name, key, color in (("before", "distance_before", "c0"), ("after", "distance_after", "c1"))
    ]
    caption = "Training moves members apart, averaging brings them back together."
    title = "Mean distance before and after each averaging"
    return _plot("distance-around-averaging", title, caption, ("step", "distance"), lines)


def _merges(merges: Sequence[Event], metric: str) -> list[AnyPlot | None]:
    """Members' scores around each merge, and the change."""
    steps = next((count for event in merges if (count := event.get("steps_later")) is not None), None)
    later = {} if steps is None else {"later": f"{steps:.0f} step{'s' * (steps != 1)} later"}
    names = {**MERGE_NAMES, **later}
    colors = dict(zip(names, ("quiet", "c3", "c0", "c1"), strict=True))
    data = next((event["data"] for event in merges if "data" in event), "test")
    changes = [Line(names[key], _curve(merges, partial(_change, key)), colors[key]) for key in list(names)[1:]]
    return [
        _plot(
            "score-around-merges",
            f"{metric.capitalize()} on {data} data around each merge",
            "The mean of members, and the range from the worst to the best of them.",
            ("epoch", f"{metric}, %"),
            [_mean_line(name, merges, key, colors[key]) for key, name in names.items()],
        ),
        _plot(
            *("change-by-merging", f"Change of {metric} by each merge", FIGURE_2),
            *(("epoch", f"change of {metric}, percentage points"), changes),
            has_zero=True,
        ),
    ]


def _greedy(result: Mapping[str, Any], metric: str) -> DotPlot | None:
    rows: dict[str, dict[str, list[float]]] = {}
    first = ""
    for trial in result.get("greedy_trials") or ():
        if trial["members"] and trial["score"] is not None:
            first = first or f"The soup starts with the best member, {trial['members'][0]}. "
            rows[f"+ member {trial['members'][-1]}"] = {"kept" if trial["kept"] else "left out": [trial["score"]]}
    if not rows:
        return None
    return DotPlot(
        name="greedy-soup",
        title="Steps of the greedy soup",
        caption=f"{first}Members are tried from best to worst, and kept if the score does not fall.",
        x_label=f"{metric} on validation data, %",
        rows=rows,
    )


def _similarity(result: Mapping[str, Any]) -> DotPlot | None:
    found = result.get("similarity") or {"layers": (), "members": (), "soup": ()}
    rows: dict[str, dict[str, list[float]]] = {}
    for layer, *pair in zip(found["layers"], found["members"], found["soup"], strict=False):
        series = zip(("two members", "member and soup"), pair, strict=True)
        if row := {name: [value] for name, value in series if value is not None}:
            rows[layer] = row
    if not rows:
        return None
    return DotPlot(
        name="similarity",
        title="Similarity of features, layer by layer",
        caption="Mean cosine similarity of a layer's outputs for the same inputs; 1 means the same direction.",
        x_label="cosine similarity",
        rows=rows,
    )


def _interpolation(result: Mapping[str, Any], metric: str) -> list[AnyPlot | None]:
    found = result.get("interpolation") or {"pair": (), "curves": ()}
    between = f" between members {' and '.join(map(str, found['pair']))}"
    caption = "Networks on the straight line from one member to the other. Without a barrier the line is flat."

    def lines(key: str) -> list[Line]:
        return [
            Line(
                curve["name"],
                points(zip(curve["coefficients"], curve[key], strict=False)),
                SERIES_COLORS[place % len(SERIES_COLORS)],
            )
            for place, curve in enumerate(found["curves"])
        ]

    return [
        _plot(f"interpolation-{key}", f"{title}{between}", caption, ("interpolation coefficient", y_label), lines(key))
        for key, title, y_label in (("score", metric.capitalize(), f"{metric}, %"), ("loss", "Loss", "loss"))
    ]


def _communication(averagings: Sequence[Event]) -> LinePlot | None:
    words = ("seconds-per-averaging", "Time of each averaging", "Includes waiting for other processes.")
    return _plot(*words, ("step", "seconds"), [Line("seconds", _curve(averagings, "seconds", x="step"), "c0")])


def _method_curves(settings: Settings, metrics: Sequence[Sequence[Event]], metric: str) -> list[AnyPlot | None]:
    """One line per method: means over its runs, at each epoch and around each merge."""
    colors = _colors(settings)
    over_seeds = "The mean over the runs of a method, and the range over its seeds."

    def lines(kind: str, value_of: str | Callable[[Event], float | None]) -> list[Line]:
        found = []
        for label, runs in settings.items():
            by_epoch: dict[float, list[float]] = {}
            for index, _ in runs:
                for epoch, value in _curve([event for event in metrics[index] if event["event"] == kind], value_of):
                    by_epoch.setdefault(epoch, []).append(value)
            ordered = sorted(by_epoch.items())
            band = [(epoch, min(values), max(values)) for epoch, values in ordered] if len(runs) > 1 else []
            found.append(Line(label, [(epoch, fmean(v)) for epoch, v in ordered], colors[label], band=band))
        return found

    scores = [
        _plot(
            *(f"compare-{data}-{name}", f"{title} on {data} data", over_seeds, ("epoch", f"{metric}, %")),
            lines=lines("epoch", partial(_mean_of, data) if name == "members" else data + key),
            hides_far=True,
        )
        for data in ("validation", "test")
        for name, key, title in (
            ("average-soup", "_average_soup", "Average soup"),
            ("ensemble", "_ensemble", "Ensemble"),
            ("members", "", "Mean of members"),
        )
    ]
    training = [
        _plot(f"compare-{name}", title, over_seeds, ("epoch", y_label), lines("epoch", partial(_mean_of, key)))
        for key, name, title, y_label in (
            ("losses", "training-loss", "Training loss of members", "loss"),
            ("distances", "distance-to-mean", "Distance of members to their mean", "distance"),
        )
    ]
    merges = [
        _plot(
            *(f"compare-change-{key.replace('_', '-')}", f"Change by each merge: {MERGE_NAMES[key]}"),
            *(f"{FIGURE_2} {over_seeds}", ("epoch", f"change of {metric}, percentage points")),
            lines=lines("merge", partial(_change, key)),
            has_zero=True,
        )
        for key in list(MERGE_NAMES)[1:]
    ]
    return [*scores, *training, *merges]
