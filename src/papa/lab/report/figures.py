"""Which figures a run and a comparison have: each is drawn when its numbers are there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from papa.lab.report.fields import entries, number, numbers, part
from papa.lab.report.figure import DotFigure, Figure, Line, LineFigure, points
from papa.lab.report.groups import groups_of
from papa.lab.report.table import KEYS, REMARKS, scores_of

Event = Mapping[str, Any]


def run_figures(result: Mapping[str, Any], events: Sequence[Event]) -> dict[str, list[Figure]]:
    """The figures of one run, by the section they belong to."""
    epochs = [event for event in events if event.get("event") == "epoch" and number(event.get("epoch")) is not None]
    merges = [event for event in events if event.get("event") == "merge" and number(event.get("epoch")) is not None]
    averagings = [event for event in events if event.get("event") == "average"]
    sections: dict[str, list[Figure | None]] = {
        "training": [*_training(epochs), _around_averagings(averagings)],
        "merges": _merges(merges),
        "greedy": [_greedy(result)],
        "similarity": [_similarity(result)],
        "interpolation": _interpolation(result),
        "communication": [_communication(averagings)],
    }
    return {name: [figure for figure in figures if figure is not None] for name, figures in sections.items()}


def _line_figure(lines: Sequence[Line], **words: Any) -> LineFigure | None:
    """A figure of the lines that have points, each in the colour it has when all do; None when none has."""
    drawn = [replace(line, place=place) for place, line in enumerate(lines) if line.points]
    return LineFigure(lines=drawn, **words) if drawn else None


def _training(epochs: Sequence[Event]) -> list[Figure | None]:
    ensemble = points((number(event["epoch"]), number(event.get("validation_ensemble"))) for event in epochs)
    return [
        _line_figure(
            [*_members(epochs, "validation"), Line("ensemble", ensemble, "ensemble")],
            name="validation-score",
            title="Score on the validation data",
            caption="Each member, their mean, and the ensemble of all of them after every epoch.",
            x_label="epoch",
            y_label="score",
        ),
        _line_figure(
            _members(epochs, "losses"),
            name="training-loss",
            title="Training loss",
            caption="Each member's mean loss over the epoch, under its own augmentation.",
            x_label="epoch",
            y_label="loss",
        ),
        _line_figure(
            _members(epochs, "distances"),
            name="distance-to-mean",
            title="Distance of members to the mean",
            caption="How far each member's weights are from the population's mean. Where it stays large, "
            "the average soup cannot be good.",
            x_label="epoch",
            y_label="distance",
        ),
    ]


def _members(epochs: Sequence[Event], key: str) -> list[Line]:
    """A line for each member, and one for their mean."""
    rows = [(number(event["epoch"]), numbers(event.get(key))) for event in epochs]
    size = max((len(values) for _, values in rows), default=0)
    members = [
        Line(f"member {j}", points((epoch, values[j]) for epoch, values in rows if j < len(values)))
        for j in range(size)
    ]
    mean = [(epoch, _mean(values)) for epoch, values in rows if len(values) == size]
    return [*members, Line("mean", points(mean), "mean")] if size > 1 else members


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, where every value is there."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found and len(found) == len(values) else None


def _around_averagings(averagings: Sequence[Event]) -> Figure | None:
    lines = [
        Line(name, points((number(event.get("step")), number(event.get(key))) for event in averagings))
        for name, key in (("before", "distance_before"), ("after", "distance_after"))
    ]
    return _line_figure(
        lines,
        name="distance-around-averaging",
        title="Mean distance around each averaging",
        caption="Training drives members apart, averaging brings them back.",
        x_label="step",
        y_label="distance",
    )


def _merges(merges: Sequence[Event]) -> list[Figure | None]:
    """The paper's Figure 2: accuracy around each merge, and its change."""
    later = next((count for event in merges if (count := number(event.get("steps_later"))) is not None), None)
    after_steps = "later" if later is None else f"{later:.0f} step{'s' * (later != 1)} later"
    names = {"before": "just before", "after": "just after", "later": after_steps}
    data = next((event["data"] for event in merges if isinstance(event.get("data"), str)), "test")
    around = []
    for key, name in names.items():
        rows = [(number(event["epoch"]), [v for v in numbers(event.get(key)) if v is not None]) for event in merges]
        found = [(x, values) for x, values in rows if x is not None and values]
        band = [(x, min(values), max(values)) for x, values in found]
        around.append(Line(name, [(x, statistics.fmean(values)) for x, values in found], band=band))
    changes = [
        Line(names[key], points((number(event["epoch"]), _change(event, key)) for event in merges))
        for key in ("after", "later")
    ]
    return [
        _line_figure(
            around,
            name="score-around-merges",
            title=f"Score on the {data} data around each merge",
            caption="The members' mean, and the band from the worst to the best of them (the paper's Figure 2).",
            x_label="epoch",
            y_label="score",
        ),
        _line_figure(
            changes,
            name="change-by-merging",
            title="Change of the score by each merge",
            caption="The members' mean compared with just before the merge.",
            x_label="epoch",
            y_label="change of score",
            has_zero=True,
        ),
    ]


def _change(event: Event, key: str) -> float | None:
    before, after = _mean(numbers(event.get("before"))), _mean(numbers(event.get(key)))
    return None if before is None or after is None else after - before


def _greedy(result: Mapping[str, Any]) -> Figure | None:
    rows: dict[str, dict[str, list[float]]] = {}
    first = ""
    for trial in entries(result.get("greedy_trials")):
        score, members = number(trial.get("score")), numbers(trial.get("members"))
        if score is None or not members or members[0] is None or members[-1] is None:
            continue
        first = first or f"Begun with the best, member {members[0]:.0f}. "
        rows[f"+ member {members[-1]:.0f}"] = {"kept" if trial.get("kept") is True else "left out": [score]}
    if not rows:
        return None
    return DotFigure(
        name="greedy-soup",
        title="How the greedy soup came about",
        caption=f"{first}Each next one, from the better to the worse, is kept where the score does not fall.",
        x_label="score on the validation data",
        rows=rows,
    )


def _similarity(result: Mapping[str, Any]) -> Figure | None:
    found = part(result, "similarity")
    layers = part(found, "layers")
    if not isinstance(layers, list):
        return None
    series = {"between members": numbers(part(found, "members")), "member and soup": numbers(part(found, "soup"))}
    rows = {
        str(layer): row
        for index, layer in enumerate(layers)
        if (row := {name: [v] for name, values in series.items() if (v := _at(values, index)) is not None})
    }
    if not rows:
        return None
    return DotFigure(
        name="similarity",
        title="Similarity of features, layer by layer",
        caption="Mean cosine similarity of what layers put out for the same inputs; 1 is the same direction.",
        x_label="cosine similarity",
        rows=rows,
    )


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _interpolation(result: Mapping[str, Any]) -> list[Figure | None]:
    curves = entries(part(result, "interpolation", "curves"))
    pair = [member for member in numbers(part(result, "interpolation", "pair")) if member is not None]
    between = "between members " + " and ".join(f"{member:.0f}" for member in pair) if len(pair) == 2 else ""

    def figure(key: str, title: str) -> Figure | None:
        lines = [
            Line(
                str(curve.get("name", "curve")),
                points(zip(numbers(curve.get("coefficients")), numbers(curve.get(key)), strict=False)),
            )
            for curve in curves
        ]
        return _line_figure(
            lines,
            name=f"interpolation-{key}",
            title=f"{title} {between}".strip(),
            caption="Networks on the straight line from one member to the other. Members in one basin have no barrier.",
            x_label="coefficient",
            y_label=key,
        )

    return [figure("score", "Score"), figure("loss", "Loss")]


def _communication(averagings: Sequence[Event]) -> Figure | None:
    steps = [(number(event.get("step")), number(event.get("seconds"))) for event in averagings]
    return _line_figure(
        [Line("seconds", points(steps))],
        name="seconds-per-averaging",
        title="Seconds of each averaging",
        caption="Waiting for other processes included.",
        x_label="step",
        y_label="seconds",
    )


def compare_figures(
    results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Event]] = ()
) -> dict[str, list[Figure]]:
    """The figures that put methods side by side, by section.

    Args:
        results: what each run's `result.json` holds.
        metrics: what each run's `metrics.jsonl` holds, for the curves.
    """
    groups = groups_of(results)
    scores = [_side_by_side(groups, key, title) for key, title in KEYS.items()]
    curves = _method_curves(groups, metrics) if metrics else []
    return {
        "scores": [figure for figure in scores if figure is not None],
        "curves": [figure for figure in curves if figure is not None],
    }


def _side_by_side(groups: Mapping[str, Sequence[tuple[int, Mapping[str, Any]]]], key: str, title: str) -> Figure | None:
    rows: dict[str, dict[str, list[float]]] = {}
    for label, runs in groups.items():
        values = [v for _, result in runs if (v := number(part(scores_of(result), key))) is not None]
        if not values:
            continue
        row = (
            {"mean over runs": [statistics.fmean(values)], "single runs": values}
            if len(values) > 1
            else {"mean over runs": values}
        )
        paper = number(part(runs[0][1], "paper", key))
        rows[label] = row if paper is None else {**row, "paper, full setting": [paper]}
    if not rows:
        return None
    return DotFigure(
        name=f"compare-{key.replace('_', '-')}",
        title=title[0].upper() + title[1:],
        caption=f"{REMARKS[key][0].upper()}{REMARKS[key][1:]}.",
        x_label="score",
        rows=rows,
    )


def _method_curves(
    groups: Mapping[str, Sequence[tuple[int, Mapping[str, Any]]]], metrics: Sequence[Sequence[Event]]
) -> list[Figure | None]:
    """A line for each method: what its members' mean was at the end of each epoch, and what each merge did to it."""

    def lines(kind: str, value_of: Callable[[Event], float | None]) -> list[Line]:
        found = []
        for label, runs in groups.items():
            by_epoch: dict[float, list[float]] = {}
            for event in (event for index, _ in runs for event in metrics[index] if event.get("event") == kind):
                epoch, value = number(event.get("epoch")), value_of(event)
                if epoch is not None and value is not None:
                    by_epoch.setdefault(epoch, []).append(value)
            found.append(Line(label, [(epoch, statistics.fmean(values)) for epoch, values in sorted(by_epoch.items())]))
        return found

    epochs = [
        _line_figure(
            lines("epoch", partial(_mean_under, key)),
            name=f"compare-{name}",
            title=title,
            caption="The mean over the members of all runs of a method.",
            x_label="epoch",
            y_label=y_label,
        )
        for key, name, title, y_label in (
            ("validation", "validation-score", "Members' score on the validation data", "score"),
            ("losses", "training-loss", "Members' training loss", "loss"),
            ("distances", "distance-to-mean", "Members' distance to the mean", "distance"),
        )
    ]
    merges = [
        _line_figure(
            lines("merge", partial(_change, key=key)),
            name=f"compare-change-{key}",
            title=f"Change of members' score by each merge, {when}",
            caption="The mean over the members of all runs of a method, compared with just before the merge.",
            x_label="epoch",
            y_label="change of score",
            has_zero=True,
        )
        for key, when in (("after", "just after it"), ("later", "some steps later"))
    ]
    return [*epochs, *merges]


def _mean_under(key: str, event: Event) -> float | None:
    return _mean(numbers(event.get(key)))
