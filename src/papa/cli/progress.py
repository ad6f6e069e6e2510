"""A progress bar with epoch, step, losses and time left; silent when nobody is watching."""

from __future__ import annotations

from types import TracebackType

import rich.progress
from rich.console import Console

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

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """The members' losses."""
        losses = " ".join(f"{loss:.3f}" for loss in record.losses)
        self._bar.update(self._task, news=f"epoch {record.epoch}/{training.num_epochs}  losses {losses}")
