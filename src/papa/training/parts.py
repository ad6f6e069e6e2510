"""Who takes part in a training besides the members: who looks on, goes along, or takes the steps; and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from papa.averager import Averaging
from papa.evaluate import Evaluation

if TYPE_CHECKING:
    from papa.training.loop import Training


@dataclass(frozen=True)
class Length:
    """How long a training is, for rules whose cadence depends on it."""

    num_steps: int
    """Optimizer steps in all."""
    steps_per_epoch: int
    """Optimizer steps in an epoch."""


@dataclass(frozen=True)
class EpochRecord:
    """What is known of the population after an epoch."""

    epoch: int
    """Epochs done."""
    step: int
    """Optimizer steps taken."""
    lr: float
    """The learning rate of the next step."""
    losses: list[float]
    """Each member's mean training loss over the epoch."""
    validation: list[Evaluation]
    """Each member on the validation data."""
    validation_ensemble: Evaluation
    """All members together on the validation data."""
    distances: list[float]
    """Each member's distance to the mean."""


class Hook:
    """What may be told of a training while it runs. Override what you need."""

    def on_start(self, training: Training) -> None:
        """Before the first step, or the first after a resume."""

    def before_step(self, training: Training) -> None:
        """Before members take a step."""

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """After members were averaged."""

    def after_step(self, training: Training) -> None:
        """After a step and all that belongs to it: its averaging, the end of its epoch."""

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """After an epoch."""

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """After something out of the ordinary, such as a checkpoint that could not be written."""


class Companion(Protocol):
    """Something that goes along with each member and is saved with it, such as an average of its trajectory."""

    def begin(self, training: Training) -> None:
        """Before the first step, or before a checkpoint is loaded."""
        ...

    def after_step(self, training: Training) -> None:
        """After a step and all that belongs to it."""
        ...

    def forget_(self, index: int, model: nn.Module) -> None:
        """Begin anew with a member held here: it was sick, and is what is given now."""
        ...

    def member_state(self, index: int) -> dict[str, Tensor]:
        """What belongs to a member held here, by name; always of the same form."""
        ...

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `member_state` gave."""
        ...


class Engine(Protocol):
    """Another way for all members to take a step than one after the other."""

    def start_(self) -> None:
        """Before the first step, or the first after a checkpoint was loaded."""
        ...

    def step_(self) -> None:
        """Every member held here takes a step."""
        ...

    def hand_back_(self) -> None:
        """Bring the members' optimizers up to date, for a checkpoint or at the end."""
        ...

    def forget_(self, index: int) -> None:
        """Give a member held here a fresh optimizer state: it was sick."""
        ...


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How numbers are computed."""

    autocast: torch.dtype | None = None
    """Run forward passes in this dtype (bfloat16, or float16 with a gradient scaler per member); None for float32."""
    channels_last: bool = False
    """Keep images and convolutions in the memory order most convolution kernels are fastest in."""
    clip_norm: float | None = None
    """The largest norm a member's gradient may have; None for any."""
