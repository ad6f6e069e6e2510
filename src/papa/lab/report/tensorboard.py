"""Event files for TensorBoard, written during training."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from papa.averaging import Averaging
from papa.errors import RunError
from papa.training import Callback, EpochRecord, Training


class EventFiles(Callback):
    """Writes losses, scores, distances and learning rate for TensorBoard.

    A new training removes older event files in the directory; a resumed one adds to them.
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
        """Open a file; it hides events of an earlier one for steps that are repeated."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            if training.step == 0:
                for file in self.directory.glob("events.out.tfevents.*"):
                    file.unlink()
            self._writer = SummaryWriter(str(self.directory), purge_step=training.step + 1)
        except OSError as error:
            raise RunError(f"cannot write event files to {self.directory}: {error.strerror or error}") from error

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        for name, distances in (("before", averaging.distances_before), ("after", averaging.distances_after)):
            if distances is not None:
                self._writer.add_scalar(
                    f"distance_around_averaging/{name}", sum(distances) / len(distances), averaging.step
                )

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        values = {"loss": record.losses, "distance_to_mean": record.distances}
        for data, scores in (("validation", record.validation), ("test", record.test)):
            if scores is not None:
                values[f"{data}_score"] = [member.score for member in scores.members]
                values[f"{data}_loss"] = [member.loss for member in scores.members]
                self._writer.add_scalar(f"{data}_score/ensemble", scores.ensemble.score, record.step)
                self._writer.add_scalar(f"{data}_score/average_soup", scores.average_soup.score, record.step)
        for name, by_member in values.items():
            for member, value in enumerate(by_member):
                self._writer.add_scalar(f"{name}/member_{member}", value, record.step)
            self._writer.add_scalar(f"{name}/mean", sum(by_member) / len(by_member), record.step)
        self._writer.add_scalar("learning_rate", record.lr, record.step)
        self._writer.flush()
