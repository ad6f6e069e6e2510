"""One run as one object: the config, the directory, and how to execute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papa.lab import launch
from papa.lab.config import Config
from papa.lab.launch import CallbackFactory, Saving

CheckpointOptions = Saving


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run to execute."""

    config: Config
    path: Path
    workers: int | None = None
    overwrite: bool = False
    resume: bool = False
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    make_callback: CallbackFactory | None = None


def execute(spec: RunSpec, *, stop: Any = None) -> dict[str, Any]:
    """Execute a run and return the contents of its `result.json`, see `papa.lab.launch.execute`."""
    return launch.execute(
        spec.config,
        spec.path,
        workers=spec.workers,
        overwrite=spec.overwrite,
        resume=spec.resume,
        saving=spec.checkpoints,
        make_callback=spec.make_callback,
        stop=stop,
    )
