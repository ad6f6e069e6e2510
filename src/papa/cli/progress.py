"""How a training shows itself: one block that is updated on a terminal, a line per tenth elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from papa.cli.tables import event_text
from papa.lab.report.metric import Metric
from papa.training import Callback, EpochRecord, Training
from papa.training.progress import advice_on

NUM_LINES = 10
"""Number of lines that a training prints when there is no terminal."""


class Progress(Callback):
    """Shows a training while it runs, and keeps a line about it when it has ended."""

    def __init__(self, title: str, metric: Metric, *, display: bool = True) -> None:
        self.title, self.metric = title, metric
        self._console = Console(stderr=True, highlight=False)
        self._has_display = display and self._console.is_terminal
        self._epochs = self._left = self._scores = self._distance = self._advice = ""
        self._share = 0.0
        self._num_lines = 0
        self._began: tuple[float, float] | None = None
        self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if self._has_display:
            with self._ignore_write_errors():
                self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._ignore_write_errors():
            self._live.stop()
            if self._has_display and self._share == 1.0:
                self._console.print(f"{self.title}: {self._scores}", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def _ignore_write_errors(self) -> Iterator[None]:
        """A closed terminal or a full disk must not stop training."""
        try:
            yield
        except OSError:
            self._console.quiet = True

    def on_train_begin(self, training: Training) -> None:
        self.on_step_complete(training)
        self._num_lines = int(NUM_LINES * self._share)

    def on_step_complete(self, training: Training) -> None:
        now, share = time.monotonic(), training.step / training.length.num_steps
        began, first = self._began = self._began or (now, share)
        self._share = share
        self._epochs = f"epoch {training.epoch} of {training.settings.num_epochs}"
        if share > first:
            seconds = (now - began) * (1.0 - share) / (share - first)
            self._left = f"{timedelta(seconds=round(seconds))} left"

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """Print the event, above the display if there is one."""
        with self._ignore_write_errors():
            self._console.print(Text(f"papa: {event_text(event)}", style="yellow"), soft_wrap=True)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self._scores = scores_text(record, self.metric)
        distances = _finite(record.distances)
        is_population = len(record.validation.members) > 1 and distances
        self._distance = f"distance {sum(distances) / len(distances):.3g}" if is_population else ""
        self._advice = advice_on(training, record) or ""
        self.on_step_complete(training)
        if not self._has_display and int(NUM_LINES * self._share) > self._num_lines:
            self._num_lines = int(NUM_LINES * self._share)
            left = self._left if self._share < 1.0 else ""
            parts = filter(None, (self._epochs, self._scores, self._distance, self._advice, left))
            with self._ignore_write_errors():
                self._console.print(f"{self.title}: {', '.join(parts)}", markup=False, soft_wrap=True)

    def _view(self) -> RenderableType:
        bar = Table.grid(padding=(0, 2))
        texts = (Text(text) for text in (self._epochs, self._left, self._distance))
        bar.add_row(ProgressBar(total=1.0, completed=self._share, width=24), *texts)
        return Group(Text(self.title, style="bold"), bar, Text(self._scores), Text(self._advice, style="yellow"))


def scores_text(record: EpochRecord, metric: Metric) -> str:
    """The scores of an epoch on validation data, the metric's name first."""
    found = record.validation
    members = _finite([one.score for one in found.members])
    mean = f"{metric.text(sum(members) / len(members))}{metric.unit}" if members else "not finite"
    if len(found.members) == 1:
        return f"validation {metric.name} {mean}"
    ensemble, soup = (f"{metric.text(one.score)}{metric.unit}" for one in (found.ensemble, found.average_soup))
    return f"validation {metric.name}: mean {mean}, ensemble {ensemble}, average soup {soup}"


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and value == value]
