"""What the scores of some runs are: their name, unit and number of digits, and whether higher is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from papa.lab.config import flat


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
