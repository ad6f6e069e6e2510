"""The names of the trackers, which the command line knows before anything is imported."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

TrackerName: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]
NAMES: tuple[TrackerName, ...] = get_args(TrackerName)
