"""What a training is told and tells: its length, its numerics, another way to take steps, the record of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from papa.evaluation import Evaluation


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
