"""The callback that shows a training while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from papa.cli.status import Clock, RunStatus, event_text, status_line, status_view
from papa.training import Callback, EpochRecord, Training
from papa.training.progress import advice_on

NUM_LINES = 10
"""Number of lines that a training prints when there is no terminal."""


class Progress(Callback):
    """Shows a training while it runs: a display on a terminal, a few lines elsewhere."""

    def __init__(self, title: str, *, display: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._has_display = display and self._console.is_terminal
        self._status = RunStatus(title)
        self._clock = Clock()
        self._num_lines = 0
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

    def on_step_complete(self, training: Training) -> None:
        self._status.step = training.step
        self._status.seconds_left = self._clock.seconds_left(self._status.share)

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
        status.advice = advice_on(training, record)
        self.on_step_complete(training)
        if not self._has_display and int(NUM_LINES * status.share) > self._num_lines:
            self._num_lines = int(NUM_LINES * status.share)
            with self._ignore_write_errors():
                self._console.print(status_line(status), markup=False, soft_wrap=True)
