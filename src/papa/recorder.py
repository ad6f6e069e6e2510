"""Writing down a run while it trains: its metrics and checkpoints, and when to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from papa.averager import Averaging
from papa.checkpoint import CheckpointWriter, Failure
from papa.config import Config
from papa.errors import RunError, StoppedError
from papa.runs import RunDirectory
from papa.training import EpochRecord, Hook, Training
from papa.training.state import member_states, state_of

SECONDS_BETWEEN_MEETINGS = 1.0
"""How often several processes ask each other whether to stop or to save, at the least."""


class Recorder(Hook):
    """Writes a run's metrics and checkpoints, and stops it when it is asked to.

    Args:
        run: where to.
        writer: writes the checkpoints.
        config: goes into each of them.
        minutes: how long the run may go without one.
        stop: its `value` is the signal that asked the run to stop, or 0.
        notices: what is to be told at the start.
    """

    def __init__(
        self,
        run: RunDirectory,
        writer: CheckpointWriter,
        config: Config,
        *,
        minutes: float,
        stop: Any,
        notices: Sequence[str] = (),
    ) -> None:
        self.run, self.writer, self.config, self.stop, self.notices = run, writer, config, stop, notices
        self.seconds_between = 60.0 * minutes
        self._failures_in_a_row = 0
        self._saved_step = -1
        self._saved_at = self._met_at = time.monotonic()
        self._met_step = 0
        self._next_meeting = 0
        self._log_error: str | None = None

    def on_start(self, training: Training) -> None:
        """Say what a resume found."""
        self._met_step = self._saved_step = training.step
        self._next_meeting = training.step + 1
        for notice in self.notices:
            training.tell({"event": "notice", "step": training.step, "text": notice})

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """One line per averaging."""
        before, after = averaging.distances_before, averaging.distances_after
        self._log(
            training,
            {
                "event": "average",
                "step": averaging.step,
                "rule": averaging.rule,
                "alpha": averaging.alpha,
                "distance_before": None if before is None else sum(before) / len(before),
                "distance_after": None if after is None else sum(after) / len(after),
                "bytes": averaging.bytes,
                "seconds": round(averaging.seconds, 6),
            },
        )

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """One line per epoch, and a checkpoint."""
        self._log(
            training,
            {
                "event": "epoch",
                "step": record.step,
                "epoch": record.epoch,
                "lr": record.lr,
                "losses": record.losses,
                "validation": [member.score for member in record.validation],
                "validation_ensemble": record.validation_ensemble.score,
                "distances": record.distances,
            },
        )
        if not self.writer.is_busy:  # where epochs are shorter than writing is, training does not wait for the disk
            self._save(training)

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """One line for what is out of the ordinary; notices are for people only, and not part of the run."""
        if event["event"] != "notice":
            self._log(training, event)

    def after_step(self, training: Training) -> None:
        """Stop or save when it is time; all processes do so at the same step."""
        if training.step < self._next_meeting:
            return
        wants_stop, wants_save = self._meet(training)
        if (wants_stop or wants_save) and self._saved_step != training.step:
            self._save(training)
        if wants_stop:
            self._stop(training)

    def _meet(self, training: Training) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether the leading one says that it is time to save."""
        now = time.monotonic()
        seconds_per_step = (now - self._met_at) / max(1, training.step - self._met_step)
        num_steps = 1
        if training.group.num_ranks > 1:
            num_steps = int(SECONDS_BETWEEN_MEETINGS / max(seconds_per_step, 1e-6))
            num_steps = max(1, min(num_steps, 2 * (training.step - self._met_step)))
        note = (self.stop.value != 0, now - self._saved_at >= self.seconds_between, num_steps)
        notes = training.group.gather([note] * len(training.members))
        self._met_at, self._met_step = now, training.step
        self._next_meeting = training.step + notes[0][2]
        return any(note[0] for note in notes), notes[0][1]

    def _stop(self, training: Training) -> None:
        failure = self.writer.settle()
        if failure is not None:
            raise RunError(f"{self.run.path} was asked to stop at step {training.step}, but {_told(failure)}")
        training.group.wait()  # nobody leaves while somebody still writes
        raise StoppedError(
            f"stopped at step {training.step} of {training.length.num_steps}, and saved; continue with: papa resume "
            f"{self.run.path}"
        )

    def finish(self, training: Training) -> None:
        """After training: wait for what is still being written."""
        if self._saved_step != training.step:
            self._save(training)
        self._note(training, self.writer.settle())
        if self._log_error is not None:
            raise RunError(f"training is done, but {self._log_error}; make room and continue with --resume")

    def _save(self, training: Training) -> None:
        self._note(training, self.writer.settle())  # told before the next is begun, which may then go better
        state = {
            "config": self.config.to_json(),
            "training": state_of(training),
            "metrics": self.run.metrics_state(),
        }
        self.writer.save(training.step, member_states(training), state, self.run.flush_metrics)
        self._saved_step, self._saved_at = training.step, time.monotonic()

    def _note(self, training: Training, failure: Failure | None) -> None:
        """Tell of a checkpoint that failed; the second in a row ends the run."""
        if failure is None:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        training.tell({"event": "checkpoint-failed", "step": failure.step, "error": failure.error})
        if self._failures_in_a_row > 1:
            there = ". The last good one is untouched" if self.run.latest_checkpoint() is not None else ""
            raise RunError(f"twice in a row a checkpoint failed; {_told(failure)}{there}")

    def _log(self, training: Training, event: Mapping[str, Any]) -> None:
        if not training.group.leads:
            return
        error = self.run.log(event)
        if error is not None and self._log_error is None:
            training.tell({"event": "notice", "step": training.step, "text": f"{error}; its lines are kept in memory"})
        self._log_error = error


def _told(failure: Failure) -> str:
    return f"the checkpoint of step {failure.step} could not be written: {failure.error}"
