"""Writing down a run while it trains: its metrics and checkpoints, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papa.averager import Averaging
from papa.checkpoint import CheckpointWriter
from papa.errors import RunError, StoppedError
from papa.lab.config import Config
from papa.lab.runs import RunDirectory
from papa.training import EpochRecord, Training
from papa.training.saving import Saver, told


class Recorder(Saver):
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
        super().__init__(writer, minutes=minutes, notices=notices)
        self.run, self.config, self._signal = run, config, stop
        self._log_error: str | None = None

    def state_beside(self) -> dict[str, Any]:
        """What was asked for, and how far the metrics go."""
        return {"config": self.config.to_json(), "metrics": self.run.metrics_state()}

    def flush(self) -> None:
        """The metrics, up to what the checkpoint says of them."""
        self.run.flush_metrics()

    def is_asked_to_stop(self) -> bool:
        """Whether this process got a signal."""
        return bool(self._signal.value)

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
        super().on_epoch(training, record)

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """One line for what is out of the ordinary; notices are for people only, and not part of the run."""
        if event["event"] != "notice":
            self._log(training, event)

    def stop(self, training: Training) -> None:
        """Wait until it is saved, and say how to go on."""
        failure = self.writer.settle()
        if failure is not None:
            raise RunError(f"{self.run.path} was asked to stop at step {training.step}, but {told(failure)}")
        training.group.barrier()  # nobody leaves while somebody still writes
        raise StoppedError(
            f"stopped at step {training.step} of {training.length.num_steps}, and saved; continue with: papa resume "
            f"{self.run.path}"
        )

    def finish(self, training: Training) -> None:
        """The same, and the metrics must be whole."""
        super().finish(training)
        if self._log_error is not None:
            raise RunError(f"training is done, but {self._log_error}; make room and continue with --resume")

    def _log(self, training: Training, event: Mapping[str, Any]) -> None:
        if not training.group.is_leader:
            return
        error = self.run.log(event)
        if error is not None and self._log_error is None:
            training.tell({"event": "notice", "step": training.step, "text": f"{error}; its lines are kept in memory"})
        self._log_error = error
