"""Experiment trackers: one small shape, `init`, `log` and `finish`, for TensorBoard, W&B, trackio and MLflow.

Each needs the extra of its name, such as `pip install 'papa-torch[wandb]'`. Where values go is decided by the tool's
own settings, such as `WANDB_MODE=offline`, `MLFLOW_TRACKING_URI` and `TRACKIO_DIR`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from papa.core.averaging_report import Averaging
from papa.errors import ConfigError, PapaError, RunError, did_you_mean
from papa.files.storage import write_atomically
from papa.integrations.tracker_names import TrackerName
from papa.packages import importing, require
from papa.training import Callback, EpochRecord, Training


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker knows about the run that it tracks."""

    project: str | None = None
    """Of W&B and trackio; the experiment of MLflow. None for that of the tool's environment variable, or `papa`."""
    name: str | None = None
    """What the tool shows; None for a name that the tool invents."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the run."""
    directory: Path = Path(".")
    """Where local files go, in a directory named after the tracker."""
    step: int = 0
    """The steps taken already; more than 0 to continue the run that is in the directory."""

    def old_id(self, tracker: str) -> str | None:
        """The id that the run to be continued has in a tracker; None for a new run."""
        path = self.directory / tracker / "run-id"
        return path.read_text().strip() if self.step and path.exists() else None

    def keep_id(self, tracker: str, run_id: str) -> str:
        """Keep the id of a new run, to continue it later."""
        path = self.directory / tracker / "run-id"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, run_id)
        return run_id


class Tracker(Protocol):
    """Something that values are logged to; write your own for any other tool."""

    def init(self, run: TrackedRun) -> None:
        """Open a run, or continue one."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log some values of a step."""

    def finish(self, *, failed: bool) -> None:
        """Close the run; also called if it ended by an error."""


class TensorBoard:
    """Event files in the directory `tensorboard`; a new run removes those of an older one."""

    def init(self, run: TrackedRun) -> None:
        """Open a file; it hides events of an earlier one for steps that are repeated."""
        with importing():
            from torch.utils.tensorboard import SummaryWriter
        directory = run.directory / "tensorboard"
        if run.step == 0:
            for file in directory.glob("events.out.tfevents.*"):
                file.unlink()
        self._writer: Any = SummaryWriter(str(directory), purge_step=run.step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """Weights & Biases; local files are in the directory `wandb`. `WANDB_MODE=offline` needs no account."""

    def init(self, run: TrackedRun) -> None:
        """Start or continue a run."""
        with importing():
            import wandb
        self._run: Any = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT", "papa"),
            name=run.name,
            id=run.old_id("wandb") or run.keep_id("wandb", secrets.token_hex(4)),
            resume="allow",
            config=dict(run.config),
            dir=str(run.directory),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        """Upload or write what is left."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """trackio, whose local files are in `TRACKIO_DIR`."""

    def init(self, run: TrackedRun) -> None:
        """Start or continue a run."""
        with importing():
            import trackio
        new_name = run.name or f"papa-{secrets.token_hex(4)}"
        self._finish: Any = trackio.finish
        with contextlib.redirect_stdout(sys.stderr):  # it prints, while standard output is that of the program
            self._run: Any = trackio.init(
                project=run.project or "papa",
                name=run.old_id("trackio") or run.keep_id("trackio", new_name),
                config=dict(run.config),
                resume="allow" if run.step else "never",
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        """Write what is left."""
        with contextlib.redirect_stdout(sys.stderr):
            self._finish()


class MLflow:
    """MLflow at `MLFLOW_TRACKING_URI`; without it and without a database, files in the directory `mlflow`."""

    MAX_PARAMS: ClassVar[int] = 100
    """The number of parameters that MLflow takes at a time."""

    def init(self, run: TrackedRun) -> None:
        """Start or continue a run."""
        with importing():
            import mlflow
            from mlflow.entities import Param
        uri = None
        is_set = mlflow.is_tracking_uri_set()  # type: ignore[no-untyped-call]
        if not is_set and importlib.util.find_spec("sqlalchemy") is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.directory / "mlflow").resolve().as_uri()
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        old_id = run.old_id("mlflow")
        if old_id is not None:
            self._id = old_id
            self._client.update_run(old_id, status="RUNNING")
            return
        project = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "papa")
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        params = [Param(name, str(value)[:500]) for name, value in run.config.items()]
        for first in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self.MAX_PARAMS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, *, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}


class Track(Callback):
    """Logs a training to a tracker: losses, scores, distances and learning rate of each epoch, and each averaging.

    Example:
        >>> track = Track("wandb", project="digits", name="first")  # for papa.train(..., callbacks=[track])

    Values that cannot be logged during training are reported once, and training goes on.

    Args:
        tracker: the name of one, or an object with `init`, `log` and `finish`.
        run: `project`, `name`, `config` and `directory`, as of `TrackedRun`.
    """

    def __init__(self, tracker: TrackerName | Tracker, **run: Any) -> None:
        if isinstance(tracker, str):
            if tracker not in TRACKERS:
                raise ConfigError(f"there is no tracker '{tracker}': {did_you_mean(tracker, TRACKERS)}")
            require(tracker)
        self.tracker: Tracker = TRACKERS[tracker]() if isinstance(tracker, str) else tracker
        self.run = TrackedRun(**{**run, "directory": Path(run.get("directory", "."))})
        self._is_open = self._has_failed = False

    def on_train_begin(self, training: Training) -> None:
        """Open the run."""
        self.open(training)

    def open(self, training: Training) -> None:
        """Open the run unless it is open, to find out early whether the tool can be used."""
        if not training.group.is_leader or self._is_open:
            return
        try:
            self.tracker.init(replace(self.run, step=training.step, config=self.run.config or _options(training)))
        except PapaError:
            raise
        except Exception as error:  # each tool has errors of its own
            raise RunError(f"{self._name} cannot be used: {error or type(error).__name__}") from error
        self._is_open = True

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """Log the distances around an averaging."""
        self._log(training, averaging_values(averaging), averaging.step)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Log what is known after an epoch."""
        self._log(training, epoch_values(record), record.step)

    def on_train_end(self, training: Training, error: BaseException | None) -> None:
        """Close the run."""
        if self._is_open:
            self._is_open = False
            self._try(training, lambda: self.tracker.finish(failed=error is not None))

    def _log(self, training: Training, values: Mapping[str, float], step: int) -> None:
        if self._is_open and values:
            self._try(training, lambda: self.tracker.log(values, step))

    def _try(self, training: Training, act: Any) -> None:
        try:
            act()
        except Exception as error:
            if not self._has_failed:
                text = f"{self._name} could not log step {training.step}, training continues: {error}"
                training.report({"event": "notice", "step": training.step, "text": text})
            self._has_failed = True

    @property
    def _name(self) -> str:
        return f"the tracker {type(self.tracker).__name__}"


def open_all(tracks: Sequence[Track], training: Training) -> None:
    """Open the runs of several trackers."""
    for track in tracks:
        track.open(training)


def averaging_values(averaging: Averaging) -> dict[str, float]:
    """The members' mean distance to their mean around an averaging, by name."""
    found = {"before": averaging.distances_before, "after": averaging.distances_after}
    return {
        f"distance_around_averaging/{name}": sum(each) / len(each) for name, each in found.items() if each is not None
    }


def epoch_values(record: EpochRecord) -> dict[str, float]:
    """Everything that is known after an epoch, by name."""
    found = {"learning_rate": record.lr}
    by_member = {"loss": record.losses, "distance_to_mean": record.distances}
    for data, scores in (("validation", record.validation), ("test", record.test)):
        if scores is not None:
            by_member[f"{data}_score"] = [member.score for member in scores.members]
            by_member[f"{data}_loss"] = [member.loss for member in scores.members]
            found[f"{data}_score/ensemble"] = scores.ensemble.score
            found[f"{data}_score/average_soup"] = scores.average_soup.score
    for name, values in by_member.items():
        found |= {f"{name}/member_{member}": value for member, value in enumerate(values)}
        found[f"{name}/mean"] = sum(values) / len(values)
    return found


def _options(training: Training) -> dict[str, Any]:
    """The options of a training that say most."""
    settings = training.settings
    names = ("num_members", "num_epochs", "batch_size", "accumulate", "seed")
    return {"rule": repr(training.averager.rule), **{name: getattr(settings, name) for name in names}}
