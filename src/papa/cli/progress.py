"""A progress bar with epoch, step, losses and time left; silent when nobody is watching."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import rich.progress
from rich.console import Console
from rich.text import Text

from papa.training import EpochRecord, Hook, Training


class Progress(Hook):
    """Shows a training while it runs.

    Args:
        title: what is being trained.
    """

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("step {task.completed}"),
            rich.progress.TextColumn("{task.fields[news]}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None, news="loading")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_start(self, training: Training) -> None:
        """Learn how long it will be."""
        news = f"epoch {training.epoch}/{training.num_epochs}"
        self._bar.update(self._task, total=training.length.num_steps, completed=training.step, news=news)

    def after_step(self, training: Training) -> None:
        """One step further."""
        self._bar.update(self._task, completed=training.step)

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """One line above the bar, or on its own where there is none."""
        self._bar.console.print(Text(f"papa: {told(event)}", style="yellow"), soft_wrap=True)

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """The members' losses."""
        losses = " ".join(f"{loss:.3f}" for loss in record.losses)
        self._bar.update(self._task, news=f"epoch {record.epoch}/{training.num_epochs}  losses {losses}")


def told(event: Mapping[str, Any]) -> str:
    """An event in words."""
    if event["event"] == "checkpoint-failed":
        return f"the checkpoint of step {event['step']} could not be written, training goes on: {event['error']}"
    if event["event"] == "sick":
        return f"member {event['member']} is sick at step {event['step']} ({event['reason']}): {event['action']}"
    return str(event.get("text", event["event"]))
