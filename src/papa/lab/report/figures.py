"""The plots of a run and of a comparison: each is made if its numbers were logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from papa.lab.report.draw import SERIES_COLORS
from papa.lab.report.fields import entries, number, numbers, part
from papa.lab.report.plot import AnyPlot, DotPlot, Line, LinePlot, Point, points
from papa.lab.report.settings import Settings, runs_by_setting
from papa.lab.report.table import KEYS, metric_of, scores_of

Event = Mapping[str, Any]
MERGE_NAMES = {"before": "before", "after_unrepaired": "after, no REPAIR", "after": "after", "later": "later"}
"""When members are scored around a merge, by the key of the event."""


def run_figures(result: Mapping[str, Any], events: Sequence[Event]) -> dict[str, list[AnyPlot]]:
    """The plots of one run, by the section of its page."""
    epochs = [event for event in events if event.get("event") == "epoch" and number(event.get("epoch")) is not None]
    merges = [event for event in events if event.get("event") == "merge" and number(event.get("epoch")) is not None]
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
    settings = runs_by_setting(results)
    story = members_to_soup(results)
    curves = _method_curves(settings, metrics, metric_of(results)) if metrics else []
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
    independent = [label for label in rows if _is_independent(settings[label])]
    has_seeds = any(len(values) > 1 for row in rows.values() for values in row.values())
    return DotPlot(
        name="members-to-soup",
        title=title,
        caption="Each line leads from the mean of single networks to their ensemble. A soup is one network: its weights "
        "are the average of all (average soup) or of some (greedy soup)."
        + " Small marks are single seeds." * has_seeds
        + " The shaded range is that of independent networks." * bool(independent),
        x_label=f"{metric_of(results)} on {data_of(results)} data, %",
        rows=rows,
        colors=_colors(settings),
        connect=(KEYS["mean"], KEYS["ensemble"]),
        reference=independent[0] if independent else None,
        value_series=KEYS["average_soup"],
    )


def data_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Which data the scores of some runs are from: test or validation, or both."""
    kinds = ["test" if isinstance(one.get("test"), Mapping) else "validation" for one in results if scores_of(one)]
    return " or ".join(dict.fromkeys(kinds)) or "test"


def _is_independent(runs: Sequence[tuple[int, Mapping[str, Any]]]) -> bool:
    return runs[0][1].get("method") == "independent"


def _colors(settings: Settings) -> dict[str, str]:
    """One color per setting, the same on all plots of a page; black for independent members, white on a dark page."""
    others = [label for label, runs in settings.items() if not _is_independent(runs)]
    colors = {label: SERIES_COLORS[place % len(SERIES_COLORS)] for place, label in enumerate(others)}
    return {label: colors.get(label, "ink") for label in settings}


def _line_plot(lines: Iterable[Line], **words: Any) -> LinePlot | None:
    drawn = [line for line in lines if line.points]
    return LinePlot(lines=drawn, **words) if drawn else None


def _training(epochs: Sequence[Event], metric: str) -> list[AnyPlot | None]:
    def scores(data: str) -> LinePlot | None:
        one_each = [
            Line(name, _over_epochs(epochs, lambda event, key=key: number(event.get(key))), color)
            for name, key, color in (
                ("ensemble", f"{data}_ensemble", "c0"),
                ("average soup", f"{data}_average_soup", "c1"),
            )
        ]
        return _line_plot(
            [*_members(epochs, data), *one_each],
            name=f"{data}-score",
            title=f"{metric.capitalize()} on {data} data",
            caption="After each epoch: each member, their mean, and, if logged, their ensemble and their average soup.",
            x_label="epoch",
            y_label=f"{metric}, %",
            hides_far=True,
        )

    return [
        scores("validation"),
        scores("test"),
        _line_plot(
            _members(epochs, "losses"),
            name="training-loss",
            title="Training loss",
            caption="Each member's mean loss over the epoch, on its own augmented data.",
            x_label="epoch",
            y_label="loss",
        ),
        _line_plot(
            _members(epochs, "distances"),
            name="distance-to-mean",
            title="Distance of members to their mean",
            caption="Euclidean distance of each member's weights to the mean of all. If it stays large, the average "
            "soup cannot be good.",
            x_label="epoch",
            y_label="distance",
        ),
    ]


def _over_epochs(events: Sequence[Event], value: Callable[[Event], float | None]) -> list[Point]:
    return points((number(event.get("epoch")), value(event)) for event in events)


def _members(epochs: Sequence[Event], key: str) -> list[Line]:
    """A thin line for each member, and a strong one for their mean."""
    rows = [(number(event["epoch"]), numbers(event.get(key))) for event in epochs]
    size = max((len(values) for _, values in rows), default=0)
    members = [
        Line(
            f"member {index}",
            points((epoch, values[index]) for epoch, values in rows if index < len(values)),
            "quiet",
            is_member=size > 1,
        )
        for index in range(size)
    ]
    return members if size < 2 else [*members, _mean_line("mean of members", epochs, key, "ink")]


def _mean_line(name: str, events: Sequence[Event], key: str, color: str) -> Line:
    """The mean over members, with the range from the lowest to the highest of them."""
    band = []
    for event in events:
        epoch, values = number(event.get("epoch")), numbers(event.get(key))
        if epoch is not None and values and None not in values:
            found = [value for value in values if value is not None]
            band.append((epoch, min(found), max(found)))
    return Line(name, _over_epochs(events, partial(_mean_of, key)), color, band=band)


def _mean_of(key: str, event: Event) -> float | None:
    """The mean over members, if each of them has a number."""
    values = numbers(event.get(key))
    found = [value for value in values if value is not None]
    return fmean(found) if found and len(found) == len(values) else None


def _change(key: str, event: Event) -> float | None:
    """How much better members are than just before a merge."""
    before, after = _mean_of("before", event), _mean_of(key, event)
    return None if before is None or after is None else after - before


def _around_averagings(averagings: Sequence[Event]) -> LinePlot | None:
    lines = [
        Line(name, points((number(event.get("step")), number(event.get(key))) for event in averagings), color)
        for name, key, color in (("before", "distance_before", "c0"), ("after", "distance_after", "c1"))
    ]
    return _line_plot(
        lines,
        name="distance-around-averaging",
        title="Mean distance before and after each averaging",
        caption="Training moves members apart, averaging brings them back together.",
        x_label="step",
        y_label="distance",
    )


def _merges(merges: Sequence[Event], metric: str) -> list[AnyPlot | None]:
    """Members' scores around each merge, and the change."""
    steps = next((count for event in merges if (count := number(event.get("steps_later"))) is not None), None)
    later = {} if steps is None else {"later": f"{steps:.0f} step{'s' * (steps != 1)} later"}
    names = {**MERGE_NAMES, **later}
    colors = dict(zip(names, ("quiet", "c3", "c0", "c1"), strict=True))
    data = next((event["data"] for event in merges if event.get("data") in ("test", "validation")), "test")
    changes = [
        Line(names[key], _over_epochs(merges, partial(_change, key)), colors[key])
        for key in ("after_unrepaired", "after", "later")
    ]
    return [
        _line_plot(
            [_mean_line(name, merges, key, colors[key]) for key, name in names.items()],
            name="score-around-merges",
            title=f"{metric.capitalize()} on {data} data around each merge",
            caption="The mean of members, and the range from the worst to the best of them.",
            x_label="epoch",
            y_label=f"{metric}, %",
        ),
        _line_plot(
            changes,
            name="change-by-merging",
            title=f"Change of {metric} by each merge",
            caption="The mean of members compared with just before the merge (the paper's Figure 2).",
            x_label="epoch",
            y_label=f"change of {metric}, percentage points",
            has_zero=True,
        ),
    ]


def _greedy(result: Mapping[str, Any], metric: str) -> DotPlot | None:
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
        caption=f"{first}Members are tried from best to worst, and kept if the score does not fall.",
        x_label=f"{metric} on validation data, %",
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
        for layer, *values in zip(layers, *(column + [None] * len(layers) for column in series.values()), strict=False)
        if (row := {name: [value] for name, value in zip(series, values, strict=True) if value is not None})
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


def _interpolation(result: Mapping[str, Any], metric: str) -> list[AnyPlot | None]:
    curves = entries(part(result, "interpolation", "curves"))
    pair = [member for member in numbers(part(result, "interpolation", "pair")) if member is not None]
    between = "between members " + " and ".join(f"{member:.0f}" for member in pair) if len(pair) == 2 else ""

    def plot(key: str, title: str, y_label: str) -> LinePlot | None:
        lines = [
            Line(
                str(curve.get("name", "curve")),
                points(zip(numbers(curve.get("coefficients")), numbers(curve.get(key)), strict=False)),
                SERIES_COLORS[place % len(SERIES_COLORS)],
            )
            for place, curve in enumerate(curves)
        ]
        return _line_plot(
            lines,
            name=f"interpolation-{key}",
            title=f"{title} {between}".strip(),
            caption="Networks on the straight line from one member to the other. Without a barrier the line is flat.",
            x_label="interpolation coefficient",
            y_label=y_label,
        )

    return [plot("score", metric.capitalize(), f"{metric}, %"), plot("loss", "Loss", "loss")]


def _communication(averagings: Sequence[Event]) -> LinePlot | None:
    steps = [(number(event.get("step")), number(event.get("seconds"))) for event in averagings]
    return _line_plot(
        [Line("seconds", points(steps), "c0")],
        name="seconds-per-averaging",
        title="Time of each averaging",
        caption="Includes waiting for other processes.",
        x_label="step",
        y_label="seconds",
    )


def _method_curves(settings: Settings, metrics: Sequence[Sequence[Event]], metric: str) -> list[AnyPlot | None]:
    """One line per method: means over its runs, at each epoch and around each merge."""
    colors = _colors(settings)

    def plot(kind: str, value_of: Callable[[Event], float | None], **words: Any) -> LinePlot | None:
        lines = []
        for label, runs in settings.items():
            by_epoch: dict[float, list[float]] = {}
            for event in (event for index, _ in runs for event in metrics[index] if event.get("event") == kind):
                epoch, value = number(event.get("epoch")), value_of(event)
                if epoch is not None and value is not None:
                    by_epoch.setdefault(epoch, []).append(value)
            means = [(epoch, fmean(values)) for epoch, values in sorted(by_epoch.items())]
            band = [(epoch, min(values), max(values)) for epoch, values in sorted(by_epoch.items())]
            lines.append(Line(label, means, colors[label], band=band if len(runs) > 1 else ()))
        return _line_plot(lines, x_label="epoch", **words)

    over_seeds = "The mean over runs of a method, and the range over its seeds."
    scores = [
        plot(
            "epoch",
            partial(_mean_of, data) if what == "members" else lambda event, key=key: number(event.get(key)),
            name=f"compare-{data}-{what.replace(' ', '-')}",
            title=f"{title} on {data} data",
            caption=over_seeds,
            y_label=f"{metric}, %",
            hides_far=True,
        )
        for data in ("validation", "test")
        for what, key, title in (
            ("average soup", f"{data}_average_soup", "Average soup"),
            ("ensemble", f"{data}_ensemble", "Ensemble"),
            ("members", "", "Mean of members"),
        )
    ]
    training = [
        plot("epoch", partial(_mean_of, key), name=name, title=title, caption=over_seeds, y_label=y_label)
        for key, name, title, y_label in (
            ("losses", "compare-training-loss", "Training loss of members", "loss"),
            ("distances", "compare-distance-to-mean", "Distance of members to their mean", "distance"),
        )
    ]
    merges = [
        plot(
            "merge",
            partial(_change, key),
            name=f"compare-change-{key.replace('_', '-')}",
            title=f"Change by each merge: {MERGE_NAMES[key]}",
            caption="The mean of members compared with just before the merge (the paper's Figure 2). " + over_seeds,
            y_label=f"change of {metric}, percentage points",
            has_zero=True,
        )
        for key in ("after_unrepaired", "after", "later")
    ]
    return [*scores, *training, *merges]
