"""The plots of a run and of a comparison: each is made if its numbers were logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from papa.lab.report.draw import SERIES_COLORS
from papa.lab.report.fields import entries, number, numbers, part
from papa.lab.report.metric import Metric, metric_of
from papa.lab.report.plot import AnyPlot, DotPlot, Line, LinePlot, Point, points
from papa.lab.report.settings import Settings, runs_by_setting
from papa.lab.report.table import KEYS, scores_of

Event = Mapping[str, Any]
MERGE_NAMES = {"before": "before", "after_unrepaired": "after, no REPAIR", "after": "after", "later": "later"}
"""When members are scored around a merge, by the key of the event."""
FIGURE_2 = "The mean of members compared with just before the merge (the paper's Figure 2)."


def run_figures(result: Mapping[str, Any], events: Sequence[Event]) -> dict[str, list[AnyPlot]]:
    """The plots of one run, by the section of its page."""
    epochs, merges = (
        [event for event in events if event.get("event") == kind and number(event.get("epoch")) is not None]
        for kind in ("epoch", "merge")
    )
    averagings = [event for event in events if event.get("event") == "average"]
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
    """The plots that compare methods, by the section of the page.

    Args:
        results: the `result.json` of each run.
        metrics: the events of each run's `metrics.jsonl`, for the curves.
    """
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
            if (values := [v for _, run in settings[label] if (v := number(scores_of(run).get(key))) is not None])
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
    kinds = ["test" if isinstance(one.get("test"), Mapping) else "validation" for one in results if scores_of(one)]
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


def _training(epochs: Sequence[Event], metric: Metric) -> list[AnyPlot | None]:
    scores = [
        _plot(
            f"{data}-score",
            f"{_capital(metric)} on {data} data",
            "After each epoch: each member, their mean, and, if logged, their ensemble and their average soup.",
            ("epoch", metric.label),
            [
                *_members(epochs, data),
                Line("ensemble", _curve(epochs, partial(_value, f"{data}_ensemble")), "c0"),
                Line("average soup", _curve(epochs, partial(_value, f"{data}_average_soup")), "c1"),
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


def _curve(events: Sequence[Event], value_of: Callable[[Event], float | None]) -> list[Point]:
    return points((number(event.get("epoch")), value_of(event)) for event in events)


def _members(epochs: Sequence[Event], key: str) -> list[Line]:
    """A thin line for each member, and a strong one for their mean."""
    size = max((len(numbers(event.get(key))) for event in epochs), default=0)
    members = [
        Line(f"member {index}", _curve(epochs, partial(_member_value, key, index)), "quiet", is_member=size > 1)
        for index in range(size)
    ]
    return members if size < 2 else [*members, _mean_line("mean of members", epochs, key, "ink")]


def _mean_line(name: str, events: Sequence[Event], key: str, color: str) -> Line:
    """The mean over members, with the range from the lowest to the highest of them."""
    band = []
    for event in events:
        epoch, values = number(event.get("epoch")), [v for v in numbers(event.get(key)) if v is not None]
        if epoch is not None and values:
            band.append((epoch, min(values), max(values)))
    return Line(name, _curve(events, partial(_mean_of, key)), color, band=band)


def _value(key: str, event: Event) -> float | None:
    return number(event.get(key))


def _member_value(key: str, index: int, event: Event) -> float | None:
    values = numbers(event.get(key))
    return values[index] if index < len(values) else None


def _mean_of(key: str, event: Event) -> float | None:
    """The mean over members, if each of them has a number."""
    values = numbers(event.get(key))
    found = [value for value in values if value is not None]
    return fmean(found) if found and len(found) == len(values) else None


def _change(key: str, event: Event) -> float | None:
    """The change of the members' mean score since just before a merge."""
    before, after = _mean_of("before", event), _mean_of(key, event)
    return None if before is None or after is None else after - before


def _around_averagings(averagings: Sequence[Event]) -> LinePlot | None:
    lines = [
        Line(name, points((number(event.get("step")), number(event.get(key))) for event in averagings), color)
        for name, key, color in (("before", "distance_before", "c0"), ("after", "distance_after", "c1"))
    ]
    caption = "Training moves members apart, averaging brings them back together."
    title = "Mean distance before and after each averaging"
    return _plot("distance-around-averaging", title, caption, ("step", "distance"), lines)


def _merges(merges: Sequence[Event], metric: Metric) -> list[AnyPlot | None]:
    """Members' scores around each merge, and the change."""
    steps = next((count for event in merges if (count := number(event.get("steps_later"))) is not None), None)
    later = {} if steps is None else {"later": f"{steps:.0f} step{'s' * (steps != 1)} later"}
    names = {**MERGE_NAMES, **later}
    colors = dict(zip(names, ("quiet", "c3", "c0", "c1"), strict=True))
    data = next((event["data"] for event in merges if event.get("data") in ("test", "validation")), "test")
    changes = [Line(names[key], _curve(merges, partial(_change, key)), colors[key]) for key in list(names)[1:]]
    return [
        _plot(
            "score-around-merges",
            f"{_capital(metric)} on {data} data around each merge",
            "The mean of members, and the range from the worst to the best of them.",
            ("epoch", metric.label),
            [_mean_line(name, merges, key, colors[key]) for key, name in names.items()],
        ),
        _plot(
            *("change-by-merging", f"Change of {metric.name} by each merge", FIGURE_2),
            *(("epoch", metric.change_label), changes),
            has_zero=True,
        ),
    ]


def _greedy(result: Mapping[str, Any], metric: Metric) -> DotPlot | None:
    rows: dict[str, dict[str, list[float]]] = {}
    first = ""
    for trial in entries(result.get("greedy_trials")):
        score, members = number(trial.get("score")), numbers(trial.get("members"))
        if score is None or not members or members[0] is None or members[-1] is None:
            continue
        first = first or f"The soup starts with the best member, {members[0]:.0f}. "
        rows[f"+ member {members[-1]:.0f}"] = {"kept" if trial.get("kept") is True else "left out": [score]}
    if not rows:
        return None
    return DotPlot(
        name="greedy-soup",
        title="Steps of the greedy soup",
        caption=f"{first}Members are tried from best to worst, and kept if the score does not get worse.",
        x_label=_on_data(metric, "validation"),
        rows=rows,
    )


def _similarity(result: Mapping[str, Any]) -> DotPlot | None:
    found = part(result, "similarity")
    layers = part(found, "layers")
    if not isinstance(layers, list):
        return None
    series = {"two members": numbers(part(found, "members")), "member and soup": numbers(part(found, "soup"))}
    rows = {
        str(layer): row
        for place, layer in enumerate(layers)
        if (row := {k: [v] for k, values in series.items() if (v := dict(enumerate(values)).get(place)) is not None})
    }
    if not rows:
        return None
    return DotPlot(
        name="similarity",
        title="Similarity of features, layer by layer",
        caption="Mean cosine similarity of a layer's outputs for the same inputs; 1 means the same direction.",
        x_label="cosine similarity",
        rows=rows,
    )


def _interpolation(result: Mapping[str, Any], metric: Metric) -> list[AnyPlot | None]:
    curves = entries(part(result, "interpolation", "curves"))
    pair = [member for member in numbers(part(result, "interpolation", "pair")) if member is not None]
    between = " between members " + " and ".join(f"{member:.0f}" for member in pair) if len(pair) == 2 else ""
    caption = "Networks on the straight line from one member to the other. Without a barrier the line is flat."

    def lines(key: str) -> list[Line]:
        return [
            Line(
                str(curve.get("name", "curve")),
                points(zip(numbers(curve.get("coefficients")), numbers(curve.get(key)), strict=False)),
                SERIES_COLORS[place % len(SERIES_COLORS)],
            )
            for place, curve in enumerate(curves)
        ]

    return [
        _plot(f"interpolation-{key}", f"{title}{between}", caption, ("interpolation coefficient", y_label), lines(key))
        for key, title, y_label in (("score", _capital(metric), metric.label), ("loss", "Loss", "loss"))
    ]


def _communication(averagings: Sequence[Event]) -> LinePlot | None:
    steps = points((number(event.get("step")), number(event.get("seconds"))) for event in averagings)
    words = ("seconds-per-averaging", "Time of each averaging", "Includes waiting for other processes.")
    return _plot(*words, ("step", "seconds"), [Line("seconds", steps, "c0")])


def _method_curves(settings: Settings, metrics: Sequence[Sequence[Event]], metric: Metric) -> list[AnyPlot | None]:
    """One line per method: means over its runs, at each epoch and around each merge."""
    colors = _colors(settings)
    over_seeds = "The mean over the runs of a method, and the range over its seeds."

    def lines(kind: str, value_of: Callable[[Event], float | None]) -> list[Line]:
        found = []
        for label, runs in settings.items():
            by_epoch: dict[float, list[float]] = {}
            for index, _ in runs:
                for epoch, value in _curve([e for e in metrics[index] if e.get("event") == kind], value_of):
                    by_epoch.setdefault(epoch, []).append(value)
            ordered = sorted(by_epoch.items())
            band = [(epoch, min(values), max(values)) for epoch, values in ordered] if len(runs) > 1 else []
            found.append(Line(label, [(epoch, fmean(v)) for epoch, v in ordered], colors[label], band=band))
        return found

    scores = [
        _plot(
            *(f"compare-{data}-{name}", f"{title} on {data} data", over_seeds, ("epoch", metric.label)),
            lines=lines("epoch", partial(_mean_of, data) if name == "members" else partial(_value, data + key)),
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
            *(f"{FIGURE_2} {over_seeds}", ("epoch", metric.change_label)),
            lines=lines("merge", partial(_change, key)),
            has_zero=True,
        )
        for key in list(MERGE_NAMES)[1:]
    ]
    return [*scores, *training, *merges]
