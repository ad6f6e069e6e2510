"""The status of a run: one line of text, a display for terminals, and the callback that shows it during training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from papa.averaging import Averaging
from papa.lab.report.tensorboard import EventFiles
from papa.training import Callback, EpochRecord, Training

MAX_MEMBERS = 12
"""Number of members that are shown one by one."""


@dataclass
class RunStatus:
    """What is known about a run."""

    title: str
    step: int = 0
    num_steps: int | None = None
    epoch: int = 0
    num_epochs: int | None = None
    losses: Sequence[float | None] = ()
    scores: Sequence[float | None] = ()
    distances: Sequence[float | None] = ()
    ensemble: float | None = None
    average_soup: float | None = None
    digits: int = 2
    """Digits of scores after the point."""
    seconds_left: float | None = None
    warnings: list[str] = field(default_factory=list)
    interruption: str | None = None
    """Why the run does not continue, and how to continue it."""

    @property
    def share(self) -> float:
        """The share of training that is done, 0 to 1."""
        if self.num_steps:
            return min(1.0, self.step / self.num_steps)
        return min(1.0, self.epoch / self.num_epochs) if self.num_epochs else 0.0


def status_line(status: RunStatus) -> str:
    """One line, for files and pipes.

    Example:
        >>> status_line(RunStatus("digits", epoch=2, num_epochs=4, losses=[0.5, 0.75], scores=[90.0, 92.0]))
        'digits: epoch 2/4, losses 0.5000 0.7500, mean score 91.00'
    """
    parts = [_progress("epoch", status.epoch, status.num_epochs)]
    if status.losses:
        shown = " ".join(_number(loss, 4) for loss in status.losses[:MAX_MEMBERS])
        parts.append(f"losses {shown}" + (" ..." if len(status.losses) > MAX_MEMBERS else ""))
    for name, value, digits in (
        ("mean score", _mean(status.scores), status.digits),
        ("ensemble", status.ensemble, status.digits),
        ("average soup", status.average_soup, status.digits),
        ("mean distance", _mean(status.distances), 4),
    ):
        if value is not None:
            parts.append(f"{name} {value:.{digits}f}")
    if status.seconds_left:
        parts.append(_time_left(status.seconds_left))
    if status.interruption:
        parts.append(status.interruption)
    return f"{status.title}: {', '.join(parts)}"


def status_view(status: RunStatus) -> RenderableType:
    """A progress bar and a table of members, for terminals."""
    text = _progress("epoch", status.epoch, status.num_epochs)
    if status.step:
        text += f"  {_progress('step', status.step, status.num_steps)}"
    if status.seconds_left is not None:
        text += f"  {_time_left(status.seconds_left)}"
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=1.0, completed=status.share, width=24), Text(text))
    parts: list[RenderableType] = [Text(status.title, style="bold"), bar]
    if status.losses:
        parts.append(_members_table(status))
    warnings = [*status.warnings[-3:], *([status.interruption] if status.interruption else [])]
    return Group(*parts, *(Text(warning, style="yellow") for warning in warnings))


def _members_table(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("member", "loss", "score", "distance"):
        table.add_column(name, justify="right")
    columns = ((status.losses, 4), (status.scores, status.digits), (status.distances, 4))
    for member in range(min(len(status.losses), MAX_MEMBERS)):
        cells = (_number(values[member], digits) if member < len(values) else "" for values, digits in columns)
        table.add_row(str(member), *cells)
    if len(status.losses) > MAX_MEMBERS:
        table.add_row("...")
    means = ((_mean(values), digits) for values, digits in columns)
    table.add_row("mean", *("" if mean is None else _number(mean, digits) for mean, digits in means), style="bold")
    for name, score in (("ensemble", status.ensemble), ("average soup", status.average_soup)):
        if score is not None:
            table.add_row(name, "", _number(score, status.digits), style="bold")
    return table


def _progress(name: str, count: int, total: int | None) -> str:
    return f"{name} {count}/{total}" if total else f"{name} {count}"


def _time_left(seconds: float) -> str:
    return f"{timedelta(seconds=max(0, round(seconds)))} left"


def _number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite else None


class Clock:
    """Estimates the remaining time from the progress since the first call."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def seconds_left(self, share: float) -> float | None:
        """The remaining time at the pace so far; None before there was progress."""
        now = time.monotonic()
        if self._first is None or share < self._first[1]:
            self._first = (now, share)
        start, first_share = self._first
        return (now - start) * (1.0 - share) / (share - first_share) if share > first_share else None


NUM_LINES = 10
"""Number of lines that a training prints when there is no terminal."""


class Progress(Callback):
    """Shows a training while it runs: a display on a terminal, a few lines elsewhere."""

    def __init__(self, title: str, *, display: bool = True, tensorboard: Path | None = None) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._has_display = display and self._console.is_terminal
        self._status = RunStatus(title)
        self._clock = Clock()
        self._num_lines = 0
        self._event_files = Callback() if tensorboard is None else EventFiles(tensorboard)
        self._live = Live(
            get_renderable=lambda: status_view(self._status),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> Progress:
        if self._has_display:
            with self._ignore_write_errors():
                self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._ignore_write_errors():
            self._live.stop()
        if isinstance(self._event_files, EventFiles):
            self._event_files.__exit__(*error)

    @contextlib.contextmanager
    def _ignore_write_errors(self) -> Iterator[None]:
        """A closed terminal or a full disk must not stop training."""
        try:
            yield
        except OSError:
            self._console.quiet = True

    def on_train_begin(self, training: Training) -> None:
        self._status.num_steps, self._status.num_epochs = training.length.num_steps, training.settings.num_epochs
        self._status.epoch, self._status.digits = training.epoch, 2 if training.task.higher_is_better else 4
        self.on_step_complete(training)
        self._num_lines = int(NUM_LINES * self._status.share)
        self._event_files.on_train_begin(training)

    def on_step_complete(self, training: Training) -> None:
        self._status.step = training.step
        self._status.seconds_left = self._clock.seconds_left(self._status.share)

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        self._event_files.on_averaging(training, averaging)

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """Print the event, above the display if there is one."""
        with self._ignore_write_errors():
            self._console.print(Text(f"papa: {event_text(event)}", style="yellow"), soft_wrap=True)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        status = self._status
        status.epoch, status.losses, status.distances = record.epoch, record.losses, record.distances
        status.scores = [member.score for member in record.validation.members]
        status.ensemble = record.validation.ensemble.score
        status.average_soup = record.validation.average_soup.score
        self.on_step_complete(training)
        self._event_files.on_epoch_end(training, record)
        if not self._has_display and int(NUM_LINES * status.share) > self._num_lines:
            self._num_lines = int(NUM_LINES * status.share)
            with self._ignore_write_errors():
                self._console.print(status_line(status), markup=False, soft_wrap=True)


def event_text(event: Mapping[str, Any]) -> str:
    """An event as one sentence."""
    if event["event"] == "checkpoint-failed":
        return f"the checkpoint of step {event['step']} could not be written, training continues: {event['error']}"
    if event["event"] == "nonfinite":
        return f"member {event['member']} is unhealthy at step {event['step']} ({event['reason']}): {event['action']}"
    return str(event.get("text", event["event"]))
