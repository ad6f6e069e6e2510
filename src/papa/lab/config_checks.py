"""What can be wrong with a configuration."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from papa.errors import did_you_mean

if TYPE_CHECKING:
    from papa.lab.config import Config

LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}
WITH_ANCHORS = ("easgd", "lookahead", "diloco", "noloco")
"""Methods that have rows of their own, which merge hooks do not know."""


def problems_of(config: Config) -> Iterator[str]:
    """Everything that is wrong with a config: values outside of their limits, and values that do not go together."""
    yield from _values_outside_limits(config)
    train, average, data, diversity = config.train, config.average, config.data, config.diversity
    if not 0 <= train.min_lr <= max(train.lr, 0):
        yield f"--train.min-lr is {train.min_lr}, expected 0 to --train.lr ({train.lr})"
    if train.warmup_epochs > train.epochs:
        yield f"--train.warmup-epochs is {train.warmup_epochs}, expected at most --train.epochs ({train.epochs})"
    if train.engine == "stacked" and train.precision == "float16":
        yield "--train.engine is stacked, which has no gradient scaler for --train.precision float16: use bfloat16"
    if diversity.grid == "dart" and diversity.per_batch:
        yield "--diversity.grid is dart, which has one policy per member: leave out --diversity.per-batch"
    if train.engine == "stacked" and train.accumulate > 1:
        yield f"--train.accumulate is {train.accumulate} with --train.engine stacked, expected 1: use loop"
    if diversity.parts == "folds" and config.members == 1:
        yield "--diversity.parts is folds with --members 1, expected at least 2"
    if data.window is not None and data.overlap >= data.window:
        yield f"--data.overlap is {data.overlap}, expected less than --data.window ({data.window})"
    if average.alpha is not None and not 0 <= average.alpha <= 1:
        yield f"--average.alpha is {average.alpha}, expected 0 (merge) to 1 (never push)"
    if average.alpha is not None and average.half_life is not None:
        strengths = f"--average.alpha is {average.alpha} and --average.half-life {average.half_life}"
        yield f"{strengths}, expected one of the two: set the other to None"
    if average.stop is not None and average.stop < average.start:
        yield f"--average.stop is {average.stop}, expected at least --average.start ({average.start})"
    yield from _coupling_problems(config)
    for name in ("tournament", "elitist"):
        if getattr(average, name) and config.method != "papa-2":
            yield f"--average.{name} is on with --method {config.method}, expected papa-2"


def _coupling_problems(config: Config) -> Iterator[str]:
    method, average, coupling = config.method, config.average, config.coupling
    if method in (*WITH_ANCHORS, "wash") and average.align != "none":
        yield f"--average.align is {average.align} with --method {method}, which cannot be aligned: use none"
    if method in WITH_ANCHORS and average.mutation:
        yield f"--average.mutation is {average.mutation} with --method {method}, whose anchors it does not reach: use 0"
    if config.train.engine == "stacked" and method == "grawa":
        yield f"--train.engine is stacked, which keeps the gradients that --method {method} needs: use loop"
    cadence = 500 if coupling.every_steps is None else coupling.every_steps
    if method == "diloco" and cadence % coupling.fragments:
        yield f"--coupling.fragments is {coupling.fragments}, expected a divisor of the {cadence} steps of a round"


def _values_outside_limits(config: Any, prefix: str = "") -> Iterator[str]:
    """What is wrong with single values, by the limits of their fields."""
    for entry in dataclasses.fields(config):
        value, limits = getattr(config, entry.name), entry.metadata
        name = prefix + entry.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _values_outside_limits(value, f"{name}.")
        elif "known" in limits and value not in limits["known"]:
            yield f"--{name} is {value}: {did_you_mean(value, limits['known'])}"
        elif value is not None and any(not fits(value, limits[key]) for key, fits in LIMITS.items() if key in limits):
            yield f"--{name} is {value}, expected {_limits_text(limits)}"


def _limits_text(limits: Mapping[str, Any]) -> str:
    """Limits in words, such as `at least 1` or `at least 0 and below 1`."""
    words = {"at_least": "at least", "above": "more than", "at_most": "at most", "below": "below"}
    found = {key: limits[key] for key in LIMITS if key in limits}
    return " and ".join("finite" if limit == math.inf else f"{words[key]} {limit}" for key, limit in found.items())
