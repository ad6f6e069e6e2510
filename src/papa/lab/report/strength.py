"""The plots about the strength of averaging: the half-life of pushes, how far apart members are, and what it gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from papa.lab.report.metric import Metric
from papa.lab.report.plot import AnyPlot, Line, LinePlot, Point, points

Event = Mapping[str, Any]
MAX_OF_MEDIAN = 5.0
"""The longest half-life that is drawn, in medians of all."""


def strength_figures(epochs: Sequence[Event], averagings: Sequence[Event], metric: Metric) -> list[AnyPlot]:
    """Half-life, spread and gain over time, each if its numbers were logged."""
    checks = [event for event in averagings if event.get("member_loss") is not None]
    plots = [
        LinePlot(
            name="half-life",
            title="Half-life of the push",
            caption="The steps in which pushes halve the distance to the mean. The longer, the weaker the push; a push "
            "that weakens with the learning rate has a longer one, which is not drawn where it is out of scale.",
            x_label="step",
            y_label="half-life, steps",
            lines=[Line("half-life", _within_scale(list(_half_lives(averagings))), "c0")],
        ),
        LinePlot(
            name="spread",
            title="Spread of members",
            caption="The root mean square distance of members to their mean, as a share of its norm.",
            x_label="epoch",
            y_label="spread, % of the norm",
            lines=[Line("spread", points((event.get("epoch"), _percent(event.get("spread"))) for event in epochs))],
            has_zero=True,
        ),
        LinePlot(
            name="gain",
            title=f"Gain of the average: {metric.name} on validation data",
            caption="The average soup compared with the mean of members, after each epoch; above zero it is better. "
            "Far below: push more strongly. Always at zero: members are nearly one network.",
            x_label="epoch",
            y_label=f"gain of {metric.name}{', percentage points' if metric.unit == '%' else ''}",
            lines=[Line("average soup", points((event.get("epoch"), _gain(event, metric)) for event in epochs), "c1")],
            has_zero=True,
        ),
        LinePlot(
            name="checks",
            title="Losses by which the push sets its strength",
            caption="On a batch of training data at each check: the members' mean, and their average. The push weakens "
            "while the average is better.",
            x_label="step",
            y_label="loss",
            lines=[
                Line("mean of members", points((one.get("step"), one["member_loss"]) for one in checks), "ink"),
                Line("average", points((one.get("step"), one.get("average_loss")) for one in checks), "c1"),
            ],
        ),
    ]
    return [plot for plot in plots if all(line.points for line in plot.lines)]


def _half_lives(averagings: Sequence[Event]) -> Iterator[Point]:
    """From the share of itself a member kept, and the steps since the push before."""
    for before, event in pairwise(averagings):
        alpha, first, step = event.get("alpha"), before.get("step"), event.get("step")
        if alpha is not None and 0.0 < alpha < 1.0 and first is not None and step is not None and step > first:
            yield step, (step - first) * math.log(0.5) / math.log(alpha)


def _within_scale(found: Sequence[Point]) -> list[Point]:
    """Without the last half-lives of a schedule that ends at 0, which would flatten all others."""
    longest = MAX_OF_MEDIAN * median(length for _, length in found) if found else 0.0
    return [(step, length) for step, length in found if length <= longest]


def _gain(epoch: Event, metric: Metric) -> float | None:
    members = [score for score in epoch.get("validation") or () if score is not None]
    soup = epoch.get("validation_average_soup")
    if soup is None or not members:
        return None
    gain: float = soup - fmean(members)
    return gain if metric.higher_is_better else -gain


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share
