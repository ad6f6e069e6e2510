"""Recording a run while it trains: metrics, checkpoints, and the response to signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papa.core.averager import Averaging
from papa.errors import RunError, StoppedError
from papa.lab.config import Config
from papa.lab.runs import RunDirectory
from papa.lab.signals import StopFlag
from papa.training import EpochRecord, EpochScores, Training
from papa.training.checkpoints import CheckpointWriter
from papa.training.saving import Saver


class Recorder(Saver):
    """Writes a run's metrics and checkpoints, and stops it when it is asked to."""

    def __init__(
        self,
        run: RunDirectory,
        writer: CheckpointWriter,
        config: Config,
        *,
        minutes: float,
        stop: StopFlag,
        notices: Sequence[str] = (),
    ) -> None:
        super().__init__(writer, minutes=minutes, should_stop=lambda: bool(stop.value), notices=notices)
        self.run, self.config = run, config
        self._log_error: str | None = None

    def extra_state(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "metrics": self.run.metrics_state()}

    def flush(self) -> None:
        self.run.flush_metrics()

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
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
                **(averaging.decision or {}),
            },
        )

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self._log(
            training,
            {
                "event": "epoch",
                "step": record.step,
                "epoch": record.epoch,
                "lr": record.lr,
                "losses": record.losses,
                **_scores("validation", record.validation),
                **({} if record.test is None else _scores("test", record.test)),
                "distances": record.distances,
                "spread": record.spread,
            },
        )

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """Log an unusual event; notices are for the user only, and not part of the run."""
        if event["event"] != "notice":
            self._log(training, event)

    def stop(self, training: Training) -> None:
        """Wait until the state is saved, and say how to continue."""
        failure = self.writer.settle()
        if failure is not None:
            raise RunError(f"{self.run.path} was asked to stop at step {training.step}, but {failure}")
        training.group.barrier()  # nobody leaves while somebody still writes
        raise StoppedError(
            f"stopped at step {training.step} of {training.length.num_steps}, and saved; continue with: papa resume "
            f"{self.run.path}"
        )

    def finish(self, training: Training) -> None:
        """Save the end of training; the metrics must be complete."""
        super().finish(training)
        if self._log_error is not None:
            raise RunError(f"training is done, but {self._log_error}; free some space and continue with --resume")

    def _log(self, training: Training, event: Mapping[str, Any]) -> None:
        if not training.group.is_leader:
            return
        error = self.run.log(event)
        if error is not None and self._log_error is None:
            notice = f"{error}; its lines are kept in memory"
            training.report({"event": "notice", "step": training.step, "text": notice})
        self._log_error = error


def _scores(name: str, scores: EpochScores) -> dict[str, Any]:
    return {
        name: [member.score for member in scores.members],
        f"{name}_ensemble": scores.ensemble.score,
        f"{name}_average_soup": scores.average_soup.score,
    }
