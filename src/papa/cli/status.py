"""Where a run stands: as a line for files, and as a picture for terminals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

MOST_MEMBERS = 12
"""How many members a display shows one by one."""


@dataclass
class RunStatus:
    """What is known of a run at some moment."""

    title: str
    step: int = 0
    num_steps: int | None = None
    epoch: int = 0
    num_epochs: int | None = None
    losses: Sequence[float | None] = ()
    scores: Sequence[float | None] = ()
    distances: Sequence[float | None] = ()
    ensemble: float | None = None
    seconds_left: float | None = None
    notes: list[str] = field(default_factory=list)
    """What went wrong on the way."""
    halt: str | None = None
    """Why nothing moves, and what to do about it."""

    @property
    def share(self) -> float:
        """How much of training is done, 0 to 1."""
        if self.num_steps:
            return min(1.0, self.step / self.num_steps)
        return min(1.0, self.epoch / self.num_epochs) if self.num_epochs else 0.0


def status_line(standing: RunStatus) -> str:
    """One line, for files and pipes.

    Example:
        >>> status_line(RunStatus("digits", epoch=2, num_epochs=4, losses=[0.5, 0.75], scores=[90.0, 92.0]))
        'digits: epoch 2/4, losses 0.5000 0.7500, mean score 91.00'
    """
    parts = [f"epoch {standing.epoch}" + (f"/{standing.num_epochs}" if standing.num_epochs else "")]
    if standing.losses:
        shown = " ".join(map(_number, standing.losses[:MOST_MEMBERS]))
        parts.append(f"losses {shown}" + (" ..." if len(standing.losses) > MOST_MEMBERS else ""))
    for name, value, digits in (
        ("mean score", _mean(standing.scores), 2),
        ("ensemble", standing.ensemble, 2),
        ("mean distance", _mean(standing.distances), 4),
    ):
        if value is not None:
            parts.append(f"{name} {value:.{digits}f}")
    if standing.seconds_left:
        parts.append(f"{duration(standing.seconds_left)} left")
    if standing.halt:
        parts.append(standing.halt)
    return f"{standing.title}: {', '.join(parts)}"


def status_view(standing: RunStatus) -> RenderableType:
    """A bar, and a table of members."""
    words = f"epoch {standing.epoch}" + (f"/{standing.num_epochs}" if standing.num_epochs else "")
    if standing.step:
        words += f"  step {standing.step}" + (f"/{standing.num_steps}" if standing.num_steps else "")
    if standing.seconds_left is not None:
        words += f"  {duration(standing.seconds_left)} left"
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=1.0, completed=standing.share, width=24), Text(words))
    parts: list[RenderableType] = [Text(standing.title, style="bold"), bar]
    if standing.losses:
        parts.append(_members_table(standing))
    notes = [*standing.notes[-3:], *([standing.halt] if standing.halt else [])]
    parts += [Text(note, style="yellow") for note in notes]
    return Group(*parts)


def _members_table(standing: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("member", "loss", "score", "distance"):
        table.add_column(name, justify="right")
    columns = (standing.losses, standing.scores, standing.distances)
    for member in range(min(len(standing.losses), MOST_MEMBERS)):
        cells = (_number(column[member], digits) if member < len(column) else "" for column, digits in _digits(columns))
        table.add_row(str(member), *cells)
    if len(standing.losses) > MOST_MEMBERS:
        table.add_row("...", "", "", "")
    means = (("" if (mean := _mean(column)) is None else _number(mean, digits)) for column, digits in _digits(columns))
    table.add_row("mean", *means, style="bold")
    if standing.ensemble is not None:
        table.add_row("ensemble", "", _number(standing.ensemble, 2), "", style="bold")
    return table


def _digits(columns: Sequence[Sequence[float | None]]) -> list[tuple[Sequence[float | None], int]]:
    return list(zip(columns, (4, 2, 4), strict=True))


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> duration(3725.2)
        '1:02:05'
    """
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Clock:
    """Guesses how long a training will take from the steps it took since it was first looked at."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def seconds_left(self, share: float) -> float | None:
        """How long the rest takes when it goes on as it went; None before anything was seen to move.

        Args:
            share: how much is done, 0 to 1.
        """
        now = time.monotonic()
        if self._first is None or share < self._first[1]:
            self._first = (now, share)
        started, begun = self._first
        return (now - started) * (1.0 - share) / (share - begun) if share > begun else None
