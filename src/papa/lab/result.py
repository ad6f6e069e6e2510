"""The schemas of `result.json` and `metrics.jsonl`: whoever reads these files reads them with these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypedDict

from papa.storage import json_text, parse_json, validated

Numbers: TypeAlias = list[float | None]
"""None for a number that was not finite."""


class Details(TypedDict, total=False):
    """The details of a metric, such as the score of each class, for what was scored."""

    members: list[dict[str, float | None]] | None
    mean: dict[str, float | None] | None
    ensemble: dict[str, float | None] | None
    average_soup: dict[str, float | None] | None
    greedy_soup: dict[str, float | None] | None


class _Members(TypedDict):
    members: Numbers


class Scores(_Members, total=False):
    """The scores of a run on one set of data; None where a network has no finite score."""

    mean: float | None
    min: float | None
    max: float | None
    ensemble: float | None
    average_soup: float | None
    greedy_soup: float | None
    loss: dict[str, Any] | None
    details: Details | None


class SoupScores(TypedDict, total=False):
    """The scores of soups of independent members on one set of data."""

    average_soup: float | None
    greedy_soup: float | None
    details: dict[str, dict[str, float | None]] | None


class Soups(TypedDict, total=False):
    """Soups of independent members that were repaired, or aligned and repaired."""

    test: SoupScores | None
    validation: SoupScores | None
    greedy_members: list[int] | None


class Trial(TypedDict):
    """A step of the greedy soup."""

    members: list[int]
    score: float | None
    kept: bool


class Difference(TypedDict):
    """The mean difference of two networks' losses on the same examples, and its standard error."""

    mean: float | None
    error: float | None
    sign: int


class Verdict(TypedDict):
    """Whether averaging helped, what to change, and the numbers behind it; `papa.Verdict` has more of them."""

    kind: str
    advice: str
    num_examples: int
    average_loss: float | None
    gain: Difference


class BestSoup(TypedDict):
    """The best average soup by validation, and the epoch it is from."""

    epoch: int
    validation: dict[str, float | None]
    test: dict[str, float | None] | None


class NonFinite(TypedDict):
    """A member that was not finite, and what was done about it."""

    event: str
    step: int
    member: int
    reason: str
    action: str


class Similarity(TypedDict):
    """The cosine similarity of features at each layer."""

    layers: list[str]
    members: Numbers
    soup: Numbers


class Curve(TypedDict):
    """Losses and scores on the line between two members."""

    name: str
    coefficients: list[float]
    score: Numbers
    loss: Numbers


class Interpolation(TypedDict):
    """The lines between two members."""

    pair: list[int]
    curves: list[Curve]


class _Options(TypedDict, total=False):
    name: str | None
    epochs: int | None


class ConfigPart(TypedDict, total=False):
    """The options that reports mention; a config has more."""

    members: int | None
    data: _Options | None
    model: _Options | None
    train: _Options | None


class _Known(TypedDict):
    recipe: str
    method: str
    seed: int
    config: dict[str, Any]


class RunResult(_Known, total=False):
    """What `result.json` holds. Of an unfinished or older run, what is not known is None."""

    environment: dict[str, Any] | None
    network: dict[str, Any] | None
    test: Scores | None
    validation: Scores | None
    greedy_members: list[int] | None
    greedy_trials: list[Trial] | None
    verdict: Verdict | None
    best_soup: BestSoup | None
    num_averagings: int | None
    nonfinite: list[NonFinite] | None
    seconds: dict[str, float] | None
    communication: dict[str, float] | None
    failed_checkpoints: int | None
    policies: list[dict[str, Any]] | None
    repaired: Soups | None
    aligned: Soups | None
    repair: dict[str, Any] | None
    similarity: Similarity | None
    interpolation: Interpolation | None
    trajectory: dict[str, Any] | None
    paper: dict[str, float | None] | None
    paper_details: dict[str, dict[str, float | None]] | None
    paper_soups: str | None


class _Kind(TypedDict):
    event: str


class Event(_Kind, total=False):
    """A line of `metrics.jsonl`; which keys there are depends on the kind of event."""

    step: float
    epoch: float
    losses: Numbers
    distances: Numbers
    validation: Numbers
    validation_ensemble: float | None
    validation_average_soup: float | None
    test: Numbers
    test_ensemble: float | None
    test_average_soup: float | None
    alpha: float | None
    distance_before: float | None
    distance_after: float | None
    half_life: float
    member_loss: float | None
    average_loss: float | None
    spread: float | None
    bytes: float
    seconds: float
    data: str
    before: Numbers
    after_unrepaired: Numbers
    after: Numbers
    merge_step: float
    scores: Numbers
    later: Numbers | None
    steps_later: float | None
    member: float
    reason: str
    action: str
    error: str


def checked_result(value: Any) -> dict[str, Any]:
    """A result as `RunResult` describes it, with None for what is missing; a `ValueError` for anything else."""
    result = validated(value, RunResult)
    validated(result["config"], ConfigPart, name="config")
    policies = result["policies"] or []
    if any(policy.keys() != policies[0].keys() for policy in policies):
        raise ValueError("its policies differ in their options")
    return dict(result)


def as_stored(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as its file will hold it, where a number that is not finite is None."""
    stored: dict[str, Any] = parse_json(json_text(result).encode())
    return stored


def parsed_event(line: bytes) -> dict[str, Any]:
    """The event on a line of the metrics; a `ValueError` for a line that is none."""
    event: dict[str, Any] = parse_json(line)
    validated(event, Event)
    return event


def fold_merges(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A run's metrics with one event for each merge that was scored.

    A run logs scores as soon as they are known, so that it can be stopped in between: those before and after a merge at
    the merge, those some steps later in a separate event. Readers want them together.

    Example:
        >>> merge = {"event": "merge", "step": 10, "epoch": 1, "data": "test", "before": [90.0], "after": [92.0]}
        >>> later = {"event": "merge-later", "step": 12, "merge_step": 10, "data": "test", "scores": [91.0]}
        >>> (event,) = fold_merges([merge, later])
        >>> event["later"], event["steps_later"]
        ([91.0], 2)

    Returns:
        All events in order; each `merge` has `later` and `steps_later`, both None if training ended before.
    """
    folded: list[dict[str, Any]] = []
    merges: dict[Any, dict[str, Any]] = {}
    for event in events:
        kind, step, merge = event["event"], event.get("step"), merges.get(event.get("merge_step"))
        if kind == "merge-later" and step is not None and merge is not None:
            merge.update(later=event.get("scores"), steps_later=step - merge["step"])
            continue
        folded.append({"later": None, "steps_later": None, **event} if kind == "merge" else dict(event))
        if kind == "merge" and step is not None:
            merges[step] = folded[-1]
    return folded
