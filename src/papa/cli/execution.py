"""Executing runs from the command line: the options of the commands that train, and the display of progress.

What imports torch is imported last: help, wrong options and the first line of output do without.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papa.cli.escaping import printable
from papa.errors import ConfigError
from papa.lab.config import Config, flat, idle_options, option_of

if TYPE_CHECKING:
    from papa.lab.launch import RunSpec
    from papa.lab.launch_many import Outcomes
    from papa.training import CheckpointOptions


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every command that trains."""

    workers: int | None = None
    """Processes per run; None to choose. The result depends on it, by rounding, only with --train.engine stacked."""
    checkpoint_minutes: float = 10.0
    """Longest time between checkpoints; there is also one at the end of each epoch."""
    keep: int = 2
    """Number of checkpoints to keep."""
    checkpoint_background: bool = True
    """Continue training while a copy of the state is written. Off: training waits, and needs no memory for a copy."""

    @property
    def checkpoints(self) -> CheckpointOptions:
        """The options of checkpoints, checked."""
        from papa.training import CheckpointOptions

        if not self.checkpoint_minutes > 0:
            raise ConfigError(f"--checkpoint-minutes is {self.checkpoint_minutes}, expected more than 0")
        if self.keep < 1:
            raise ConfigError(f"--keep is {self.keep}, expected at least 1")
        return CheckpointOptions(minutes=self.checkpoint_minutes, keep=self.keep, background=self.checkpoint_background)

    def spec(
        self,
        title: str,
        config: Config,
        path: Path,
        *,
        overwrite: bool,
        resume: bool,
        display: bool = True,
    ) -> RunSpec:
        """A run with these options, which shows its progress."""
        from papa.cli.progress import Progress
        from papa.lab.launch import RunSpec

        return RunSpec(
            config=config,
            path=path,
            workers=self.workers,
            overwrite=overwrite,
            resume=resume,
            checkpoints=self.checkpoints,
            make_callback=partial(Progress, title, display=display),
        )


@dataclass(frozen=True, kw_only=True)
class OneRunOptions(TrainingOptions):
    """Options of the commands that execute one run."""

    def execute(self, config: Config, path: Path, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
        """Execute a run with these options and return its result."""
        config.check()
        announce([config], path)
        from papa.lab.launch import execute
        from papa.process import configure_process

        configure_process()
        return execute(self.spec(run_title(config), config, path, overwrite=overwrite, resume=resume))


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(TrainingOptions):
    """Options of the commands that execute several runs."""

    parallel: int = 1
    """Number of runs to train at the same time, each in its own process; for runs too small for several workers."""

    def check(self) -> None:
        """Raise a `ConfigError` for values that no run can have."""
        from papa.lab.launch_many import check_parallel

        check_parallel(self.parallel, self.workers)
        self.checkpoints.check()

    def execute(self, runs: Iterable[tuple[str, Config, Path]], *, overwrite: bool = False) -> Outcomes:
        """Execute runs, each given by title, config and directory; existing ones are resumed unless overwritten."""
        from papa.lab.launch_many import execute_all
        from papa.process import configure_process

        configure_process()
        specs = [self.spec(*run, overwrite=overwrite, resume=not overwrite, display=self.parallel == 1) for run in runs]
        return execute_all(specs, num_parallel=self.parallel)


def run_title(config: Config) -> str:
    """The name of a run in the display of progress."""
    return f"{config.recipe} {config.method} seed {config.seed}"


def announce(configs: Sequence[Config], path: Path) -> None:
    """Say on standard error what will be trained, before the seconds that it takes to load PyTorch."""
    if not configs or not is_main_process():
        return
    first, methods = configs[0], ", ".join(dict.fromkeys(config.method for config in configs))
    runs = f"training ({methods})" if len(configs) == 1 else f"{len(configs)} runs ({methods}), each"
    networks = f"{first.members} {first.model.name} network{'s' if first.members > 1 else ''}"
    _say(f"{runs} of {networks} on {first.data.name}, {first.train.epochs} epochs, to {path}")


def note_unused(configs: Sequence[Config], base: Config) -> None:
    """Say which options of averaging were given, compared with a recipe's config, that no method uses."""
    before = dict(flat(base.to_json()))
    unused = frozenset[str].intersection(*(idle_options(config.method) for config in configs))
    given = [option_of(key) for key, value in flat(configs[0].to_json()) if key in unused and value != before[key]]
    if given and is_main_process():
        methods = ", ".join(dict.fromkeys(config.method for config in configs))
        _say(f"{', '.join(given)}: without effect, as {methods} does not use {'it' if len(given) == 1 else 'them'}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone is no reason to stop
        print(printable(f"papa: {text}"), file=sys.stderr, flush=True)


def is_main_process() -> bool:
    """Whether this process prints: rank 0 under torchrun, otherwise every process."""
    return os.environ.get("RANK", "0") == "0"
