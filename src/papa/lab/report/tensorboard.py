"""Event files for TensorBoard, written while a population trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import TracebackType
from typing import Any

from papa.averager import Averaging
from papa.errors import ConfigError, RunError
from papa.training import Callback, EpochRecord, Training


def check_tensorboard() -> None:
    """Raise a `ConfigError` where tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard, which is not installed: pip install 'papa-torch[tensorboard]'"
        )


class EventFiles(Callback):
    """Writes losses, validation scores, distances and learning rate as TensorBoard reads them.

    Args:
        directory: where the event files go. A training that starts anew removes those of an earlier one there; one
            that is resumed goes on behind them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer: Any = None

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def on_train_begin(self, training: Training) -> None:
        """Open a file, which hides what an earlier one says of steps that are taken again."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            if training.step == 0:
                for file in self.directory.glob("events.out.tfevents.*"):
                    file.unlink()
            self._writer = SummaryWriter(str(self.directory), purge_step=training.step + 1)
        except OSError as error:
            raise RunError(f"cannot write event files to {self.directory}: {error.strerror or error}") from error

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """The mean distance before and after."""
        for name, distances in (("before", averaging.distances_before), ("after", averaging.distances_after)):
            if distances is not None:
                self._writer.add_scalar(
                    f"distance_around_averaging/{name}", sum(distances) / len(distances), averaging.step
                )

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Everything an epoch ends with."""
        values = {
            "loss": record.losses,
            "validation_score": [member.score for member in record.validation],
            "validation_loss": [member.loss for member in record.validation],
            "distance_to_mean": record.distances,
        }
        for name, by_member in values.items():
            for member, value in enumerate(by_member):
                self._writer.add_scalar(f"{name}/member_{member}", value, record.step)
            self._writer.add_scalar(f"{name}/mean", sum(by_member) / len(by_member), record.step)
        self._writer.add_scalar("validation_score/ensemble", record.validation_ensemble.score, record.step)
        self._writer.add_scalar("learning_rate", record.lr, record.step)
        self._writer.flush()
