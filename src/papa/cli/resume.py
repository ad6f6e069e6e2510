"""`papa resume DIR`: continue a run as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.cli.arguments import SavingOptions, speaks
from papa.cli.run import onlookers, print_run
from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.launch import execute
from papa.lab.runs import RunDirectory
from papa.process import configure_process

USAGE = """usage: papa resume DIR [OPTIONS]

Continues the run in DIR from its newest checkpoint, to the same bits as if it had never stopped. A run that is
finished is not run again: its table is printed. `papa resume DIR --help` lists the options.

examples:
  papa resume runs/digits-papa-seed1
  papa resume runs/digits-papa-seed1 --workers 2
  torchrun --nproc-per-node 2 -m papa resume /shared/run
"""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(SavingOptions):
    """Options of `papa resume`."""

    workers: int | None = None
    """How many processes hold the members; None for as many as help. The result does not depend on it, but for the
    stacked engine's rounding."""
    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write event files for TensorBoard too, into the run's directory tensorboard/."""


def main(arguments: Sequence[str]) -> int:
    """Continue a run."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"the directory of a run is missing\n{USAGE}".rstrip())
    run = RunDirectory(Path(arguments[0]))
    options = tyro.cli(
        ResumeOptions, prog="papa resume DIR", description="Continues the run in DIR.", args=list(arguments[1:])
    )
    config = Config.from_json(run.read_config())
    configure_process()
    result = execute(
        config,
        run.path,
        workers=options.workers,
        resume=True,
        saving=options.saving,
        make_callback=onlookers(config, run.path, tensorboard=options.tensorboard),
    )
    if speaks():
        print_run(result, run)
    return 0
