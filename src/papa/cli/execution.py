"""Executing runs from the command line: the options of the commands that train, and the display of progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.progress import Progress
from papa.errors import ConfigError
from papa.group import rank_of_torchrun
from papa.lab.config import Config
from papa.lab.launch import RunSpec, execute
from papa.lab.launch_many import Outcomes, check_parallel, execute_all
from papa.lab.packages import require
from papa.process import configure_process
from papa.training import CheckpointOptions


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every command that trains."""

    workers: int | None = None
    """Processes per run; None to choose. The result depends on it, by rounding, only with --train.engine stacked or
    auto."""
    checkpoint_minutes: float = 10.0
    """Longest time between checkpoints; there is also one at the end of each epoch."""
    keep: int = 2
    """Number of checkpoints to keep."""
    checkpoint_background: bool = True
    """Continue training while a copy of the state is written. Off: training waits, and needs no memory for a copy."""

    @property
    def checkpoints(self) -> CheckpointOptions:
        """The options of checkpoints, checked."""
        if not self.checkpoint_minutes > 0:
            raise ConfigError(f"--checkpoint-minutes is {self.checkpoint_minutes}, expected more than 0")
        if self.keep < 1:
            raise ConfigError(f"--keep is {self.keep}, expected at least 1")
        return CheckpointOptions(minutes=self.checkpoint_minutes, keep=self.keep, background=self.checkpoint_background)

    def spec(
        self, title: str, config: Config, path: Path, *, overwrite: bool, resume: bool, **progress: Any
    ) -> RunSpec:
        """A run with these options, which shows its progress."""
        return RunSpec(
            config=config,
            path=path,
            workers=self.workers,
            overwrite=overwrite,
            resume=resume,
            checkpoints=self.checkpoints,
            make_callback=partial(Progress, title, **progress),
        )


@dataclass(frozen=True, kw_only=True)
class OneRunOptions(TrainingOptions):
    """Options of the commands that execute one run."""

    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also write TensorBoard event files, to tensorboard/ in the directory of the run."""

    def execute(self, config: Config, path: Path, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
        """Execute a run with these options and return its result."""
        if self.tensorboard:
            require("tensorboard")
        configure_process()
        event_files = path / "tensorboard" if self.tensorboard else None
        spec = self.spec(run_title(config), config, path, overwrite=overwrite, resume=resume, tensorboard=event_files)
        return execute(spec)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(TrainingOptions):
    """Options of the commands that execute several runs."""

    parallel: int = 1
    """Number of runs to train at the same time, each in its own process; for runs too small for several workers."""

    def check(self) -> None:
        """Raise a `ConfigError` for values that no run can have."""
        check_parallel(self.parallel, self.workers)
        self.checkpoints.check()

    def execute(self, runs: Iterable[tuple[str, Config, Path]], *, overwrite: bool = False) -> Outcomes:
        """Execute runs, each given by title, config and directory; existing ones are resumed unless overwritten."""
        configure_process()
        specs = [self.spec(*run, overwrite=overwrite, resume=not overwrite, display=self.parallel == 1) for run in runs]
        return execute_all(specs, num_parallel=self.parallel)


def run_title(config: Config) -> str:
    """The name of a run in the display of progress."""
    return f"{config.recipe} {config.method} seed {config.seed}"


def is_main_process() -> bool:
    """Whether this process prints: rank 0 under torchrun, otherwise every process."""
    return not rank_of_torchrun()
