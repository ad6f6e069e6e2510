"""What the scores of some runs are: their name, unit and number of digits, and whether higher is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from papa.lab.config import NEVER_AVERAGED, WITH_STRENGTH, flat


@dataclass(frozen=True)
class Metric:
    """The kind of a score."""

    name: str
    unit: str = "%"
    digits: int = 2
    """Digits after the point in tables."""
    higher_is_better: bool = True

    @property
    def label(self) -> str:
        """Name and unit, for an axis."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def change_label(self) -> str:
        """The same for a difference."""
        return f"change of {self.name}{', percentage points' if self.unit == '%' else ''}"

    def text(self, value: float) -> str:
        """A score in a table."""
        return f"{value:.{self.digits}f}"

    def short(self, value: float) -> str:
        """A score in a figure or a sentence, with one digit less and its unit."""
        return f"{value:.{self.digits - 1}f}{self.unit}"


ACCURACY, F1, SCORE = Metric("accuracy"), Metric("F1"), Metric("score")
TOKEN_LOSS = Metric("loss per token", unit="", digits=4, higher_is_better=False)
METRICS = {"tiles": F1, "vaihingen": F1, "text": TOKEN_LOSS}
"""The metric of data sets whose score is not the accuracy."""


def metric_of(results: Sequence[Mapping[str, Any]]) -> Metric:
    """What the scores of some runs are; a plain score if they differ."""
    names = (dict(flat(result.get("config") or {})).get("data.name") for result in results)
    found = {METRICS.get(str(name), ACCURACY) for name in names}
    return found.pop() if len(found) == 1 else SCORE if found else ACCURACY


def is_soup_far_worse(result: Mapping[str, Any]) -> bool:
    """Whether the average soup of a run whose members were averaged is far worse than they are, on validation data.

    Example:
        >>> is_soup_far_worse({"method": "papa", "validation": {"members": [99.0, 98.5], "average_soup": 33.0}})
        True
    """
    validation = result.get("validation") or {}  # of a run that is not finished
    soup = validation.get("average_soup")
    members = [score for score in validation.get("members", ()) if score is not None]
    if result.get("method") in NEVER_AVERAGED or soup is None or not members:
        return False
    from papa.core.soups import is_far_worse  # imports torch, which listings do without

    return is_far_worse(soup, members, higher_is_better=metric_of([result]).higher_is_better)


def advice_on_epoch(result: Mapping[str, Any], epoch: Mapping[str, Any]) -> str | None:
    """Whether to push more strongly or less, by the scores of an epoch of a run; None if nothing is wrong.

    Example:
        >>> epoch = {"epoch": 9, "validation": [91.0, 90.5], "validation_average_soup": 72.0}
        >>> advice_on_epoch({"method": "papa", "config": {"train": {"epochs": 10}}}, epoch)
        'the average is worse than its members: push more strongly'
    """
    from papa.verdict import ADVICE_FROM, advice_from_scores

    num_epochs = dict(flat(result.get("config") or {})).get("train.epochs") or 0
    soup, members = epoch.get("validation_average_soup"), epoch.get("validation") or ()
    if result.get("method") not in WITH_STRENGTH or soup is None or epoch.get("epoch", 0) < ADVICE_FROM * num_epochs:
        return None
    return advice_from_scores(
        [score for score in members if score is not None],
        soup,
        spread=epoch.get("spread"),
        higher_is_better=metric_of([result]).higher_is_better,
    )
