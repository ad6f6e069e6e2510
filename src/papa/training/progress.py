"""A line of progress on standard error: in a terminal and in a notebook, otherwise only if asked for."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from papa.training.callbacks import Callback, EpochRecord
from papa.training.loop import Training
from papa.verdict import ADVICE_FROM, advice_from_scores

SECONDS_BETWEEN_LINES = 0.2


class Progress(Callback):
    """Shows the epoch, the scores of members and soup, and the time that is left, by default on standard error.

    If `is_live`, it overwrites one line, as in a terminal or notebook; otherwise it writes a line after each epoch.
    """

    def __init__(self, *, is_live: bool, file: TextIO | None = None) -> None:
        self.is_live, self._file = is_live, file
        self._scores = ""
        self._width = 0
        self._shown_at = self._began_at = 0.0
        self._first_step = 0

    def on_train_begin(self, training: Training) -> None:
        """Start the clock."""
        self._began_at, self._first_step = time.monotonic(), training.step

    def on_step_end(self, training: Training) -> None:
        """Update the line, a few times a second."""
        if self.is_live and time.monotonic() - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._show(training)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Show the scores of the epoch."""
        losses = [loss for loss in record.losses if loss == loss]
        scores = [one.score for one in record.validation.members if one.score == one.score]
        parts = [f"loss {sum(losses) / max(1, len(losses)):.3g}", f"members {sum(scores) / max(1, len(scores)):.4g}"]
        parts += [f"soup {record.validation.average_soup.score:.4g}", f"distance {max(record.distances):.3g}"]
        self._scores = ", ".join(parts)
        if advice := advice_on(training, record):
            self._scores += f" ({advice})"
        self._show(training, is_last=not self.is_live or training.step == training.length.num_steps)

    def _show(self, training: Training, *, is_last: bool = False) -> None:
        if not training.group.is_leader:
            return
        self._shown_at = time.monotonic()
        length, done = training.length, training.step - self._first_step
        seconds = (self._shown_at - self._began_at) / max(1, done) * (length.num_steps - training.step)
        epochs = f"epoch {training.step / length.steps_per_epoch:.1f} of {training.settings.num_epochs}"
        line = "  ".join(filter(None, [f"papa: {epochs}", self._scores, f"{_clock(seconds)} left"]))
        padded = line.ljust(self._width) if self.is_live else line
        self._width = len(line)
        file = sys.stderr if self._file is None else self._file
        file.write(f"{chr(13) if self.is_live else ''}{padded}{chr(10) if is_last else ''}")
        file.flush()


def advice_on(training: Training, record: EpochRecord) -> str | None:
    """Whether to push more strongly or less, by the scores of an epoch; None if it is right, or if nobody chose it.

    The first quarter of training is left out: members that start apart need time to come together.
    """
    rule = training.averager.rule
    if not rule.has_strength or record.step < ADVICE_FROM * training.length.num_steps:
        return None
    return advice_from_scores(
        [one.score for one in record.validation.members],
        record.validation.average_soup.score,
        spread=record.spread,
        higher_is_better=training.task.higher_is_better,
    )


def progress_for(verbose: bool | None) -> list[Callback]:
    """The callback for an answer to `verbose`; None for whether somebody is looking."""
    is_live = sys.stderr.isatty() or "ipykernel" in sys.modules
    if verbose is False or (verbose is None and not is_live):
        return []
    return [Progress(is_live=is_live)]


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> _clock(75), _clock(3700)
        ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
