"""What one sees while a population trains: members' losses, scores and distances, and the time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from papa.averager import Averaging
from papa.cli.status import Clock, RunStatus, status_line, status_view
from papa.training import Callback, EpochRecord, Training

NUM_LINES = 10
"""How many lines a training writes where no terminal shows a display."""


class Progress(Callback):
    """Shows a training while it runs: a display on a terminal, a few lines elsewhere.

    Args:
        title: what is being trained.
        display: False for lines also on a terminal, where several are trained side by side.
    """

    def __init__(self, title: str, *, display: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._has_display = display and self._console.is_terminal
        self._standing = RunStatus(title)
        self._clock = Clock()
        self._lines = 0
        self._live = Live(
            get_renderable=lambda: status_view(self._standing),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> Progress:
        if self._has_display:
            with self._silently():
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._silently():
            self._live.stop()

    @contextlib.contextmanager
    def _silently(self) -> Iterator[None]:
        """Nobody may be there to read, or there is no room for it: that is no reason to stop training."""
        try:
            yield
        except OSError:
            self._console.quiet = True

    def on_train_begin(self, training: Training) -> None:
        """Learn how long it will be."""
        self._standing.num_steps, self._standing.num_epochs = training.length.num_steps, training.num_epochs
        self._standing.epoch = training.epoch
        self.on_step_end(training)
        self._lines = int(NUM_LINES * self._standing.share)

    def on_step_end(self, training: Training) -> None:
        """One step further."""
        self._standing.step = training.step
        self._standing.seconds_left = self._clock.seconds_left(self._standing.share)

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """One line above the display, or on its own where there is none."""
        with self._silently():
            self._console.print(Text(f"papa: {told(event)}", style="yellow"), soft_wrap=True)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """What the epoch ended with."""
        standing = self._standing
        standing.epoch, standing.losses, standing.distances = record.epoch, record.losses, record.distances
        standing.scores = [member.score for member in record.validation]
        standing.ensemble = record.validation_ensemble.score
        self.on_step_end(training)
        if not self._has_display and int(NUM_LINES * standing.share) > self._lines:
            self._lines = int(NUM_LINES * standing.share)
            with self._silently():
                self._console.print(status_line(standing), markup=False, soft_wrap=True)


class Together(Callback):
    """Several that look on, as one.

    Args:
        makers: what makes each of them.
    """

    def __init__(self, *makers: Callable[[], AbstractContextManager[Callback]]) -> None:
        self._makers = makers
        self._stack = contextlib.ExitStack()
        self._callbacks: list[Callback] = []

    def __enter__(self) -> Together:
        with contextlib.ExitStack() as stack:
            self._callbacks = [stack.enter_context(make()) for make in self._makers]
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def on_train_begin(self, training: Training) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.on_train_begin(training)

    def on_step_begin(self, training: Training) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.on_step_begin(training)

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.on_averaging(training, averaging)

    def on_step_end(self, training: Training) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.on_step_end(training)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.on_epoch_end(training, record)

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.on_event(training, event)


def told(event: Mapping[str, Any]) -> str:
    """An event in words."""
    if event["event"] == "checkpoint-failed":
        return f"the checkpoint of step {event['step']} could not be written, training goes on: {event['error']}"
    if event["event"] == "nonfinite":
        return f"member {event['member']} is sick at step {event['step']} ({event['reason']}): {event['action']}"
    return str(event.get("text", event["event"]))
