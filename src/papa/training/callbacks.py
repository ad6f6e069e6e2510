"""Callbacks: code that runs at fixed points of a training, and may keep state with each member."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from papa.core.averaging_report import Averaging
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
