"""Callbacks: code that runs at fixed points of a training, and may keep state with each member."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from papa.core.averager import Averaging
from papa.evaluation.scores import Evaluation

if TYPE_CHECKING:
    from papa.training.loop import Training


@dataclass(frozen=True)
class EpochScores:
    """Scores on one set of data after an epoch."""

    members: list[Evaluation]
    ensemble: Evaluation
    average_soup: Evaluation


@dataclass(frozen=True)
class EpochRecord:
    """What is known of the population after an epoch, by default after each; see `Monitoring.validate_every`."""

    epoch: int
    """Epochs completed."""
    step: int
    """Optimizer steps taken."""
    lr: float
    """The learning rate of the next step."""
    losses: list[float]
    """Each member's mean training loss over the epoch."""
    validation: EpochScores
    """Members, ensemble and average soup on the validation data."""
    test: EpochScores | None
    """The same on the test data, if `Monitoring.test_each_epoch` is set and there is test data."""
    distances: list[float]
    """Each member's distance to the mean."""
    spread: float = math.nan
    """The root mean square of these distances, as a share of the mean's norm."""


class Callback:
    """Override the methods you need; all do nothing by default.

    In each step they are called in this order: `on_step_begin`, `on_averaging` if members were averaged, `on_step_end`,
    `on_epoch_end` after the last step of an epoch that is scored, `on_step_complete`. At each point, callbacks are
    called in the order in which they were given. Every method gets the `Training`, whose `population`, `optimizers`,
    `step`, `epoch`, `length` and `data` may be read, and which `stop` ends.

    A callback that keeps tensors for each member, such as an average of its weights, overrides `member_state` and the
    two methods after it; these tensors are then saved in checkpoints.
    """

    def setup(self, training: Training) -> None:
        """Called once, when the population exists and before a checkpoint is loaded."""

    def on_train_begin(self, training: Training) -> None:
        """Called before the first step, or the first step after a resume."""

    def on_step_begin(self, training: Training) -> None:
        """Called before members take a step."""

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """Called after members were averaged."""

    def on_step_end(self, training: Training) -> None:
        """Called after a step and its averaging."""

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Called after an epoch, with its losses, scores and distances."""

    def on_step_complete(self, training: Training) -> None:
        """Called when all callbacks have seen the step and the epoch: checkpoints are written here."""

    def on_train_end(self, training: Training, error: BaseException | None) -> None:
        """Called after the last step, or when training is ended by an error, which is then given."""

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """Called after something unusual: a non-finite member, a failed checkpoint, a notice (`event["event"]`)."""

    def member_state(self, index: int) -> dict[str, Tensor]:
        """The tensors kept for a local member, by name; names, shapes and dtypes must not change."""
        return {}

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `member_state` returned."""

    def reset_member_(self, index: int, model: nn.Module) -> None:
        """Start again with a local member that was non-finite; `model` is its new state."""


class Log(Callback):
    """Hands numbers to a function: losses, scores, distances and learning rate of each epoch, and of each averaging.

    Example:
        >>> log = Log(lambda values, step: print(step, values))  # for papa.train(..., callbacks=[log])

    Only the leading process calls it. After a resume, steps since the last checkpoint are logged again, with the same
    values.

    Args:
        log: called with numbers by name and the step, as `wandb.log`, `mlflow.log_metrics` and `Fabric.log_dict` are.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object]) -> None:
        self.log = log

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        if training.group.is_leader:
            self.log(averaging_values(averaging), averaging.step)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        if training.group.is_leader:
            self.log(epoch_values(record), record.step)


def averaging_values(averaging: Averaging) -> dict[str, float]:
    """The members' mean distance to their mean around an averaging, as far as it was measured, by the name in logs."""
    found = {"before": averaging.distances_before, "after": averaging.distances_after}
    return {f"papa/distance_{name}": sum(each) / len(each) for name, each in found.items() if each is not None}


def epoch_values(record: EpochRecord) -> dict[str, float]:
    """Everything that is known after an epoch, by the name in logs."""
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
