"""`papa resume RUN`: continue a stopped run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.cli.options import TrainingOptions, parse_options
from papa.cli.run import print_run
from papa.lab.config import Config
from papa.lab.runs import RunDirectory

DESCRIPTION = """Continues a run from its newest checkpoint; the result is bitwise the same as without the interruption.
Of a finished run it only prints the result.

examples:
  papa resume runs/digits-papa-seed1
  papa resume runs/digits-papa-seed1 --workers 2
  torchrun --nproc-per-node 2 -m papa resume /shared/run"""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(TrainingOptions):
    """Options of `papa resume`."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""


def main(arguments: Sequence[str]) -> int:
    options = parse_options(ResumeOptions, arguments, prog="papa resume", description=DESCRIPTION)
    options.check()
    run = RunDirectory(options.directory)
    print_run(options.execute(Config.from_json(run.read_config()), run.path, resume=True), run)
    return 0
