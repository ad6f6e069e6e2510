"""`papa runs [DIR]`: the runs in a directory, their state and scores, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.options import parse_options
from papa.cli.tables import print_table, printable
from papa.errors import ConfigError
from papa.lab.listing import ListedRun, list_runs
from papa.lab.report.metric import metric_of
from papa.lab.report.table import KEYS
from papa.storage import json_text

DESCRIPTION = """Lists the runs in a directory and in the directories in it, the newest first: recipe, method, seed,
state, scores (the members' mean, the ensemble, the average soup, the greedy soup), and when they ended or last wrote a
file. Scores are of test data, and of a run that is not finished of the last epoch's validation data.

A run is finished, running, or stopped: `papa resume RUN` continues a stopped one.

examples:
  papa runs
  papa runs runs/compare-digits --watch
  papa runs ~/experiments --json"""


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Options of `papa runs`."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """The directory, or that of one run."""
    watch: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List them again every five seconds, until no run is running; Ctrl-C stops watching, the runs continue."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a list of JSON objects instead."""


def main(arguments: Sequence[str]) -> int:
    options = parse_options(RunsOptions, arguments, prog="papa runs", description=DESCRIPTION)
    if not options.directory.is_dir():
        raise ConfigError(f"there is no directory {options.directory}: give one that holds runs, as papa runs DIR")
    while True:
        runs, errors = list_runs(options.directory)
        for error in errors:
            print(printable(f"left out: {error}"), file=sys.stderr)
        if options.json:
            print(json_text([_object(run) for run in runs], indent=2))
        elif not runs:
            print(f"there are no runs in {printable(str(options.directory))}")
        else:
            head = ("recipe", "method", "seed", "state", *(key.replace("_", " ") for key in KEYS), "when", "run")
            print_table(head, [_cells(run) for run in runs])
        if not options.watch or not any(run.state == "running" for run in runs):
            return 0
        try:
            time.sleep(5.0)
        except KeyboardInterrupt:  # how a user stops watching
            return 0
        if sys.stdout.isatty():
            print("\033[H\033[J", end="")


def _cells(run: ListedRun) -> tuple[str, ...]:
    metric = metric_of([run.result])
    numbers = ("" if (score := run.scores[key]) is None else metric.text(score) for key in KEYS)
    about = (str(run.result["recipe"]), str(run.result["method"]), str(run.result["seed"]), run.progress)
    return (*about, *numbers, time.strftime("%Y-%m-%d %H:%M", time.localtime(run.time)), str(run.path))


def _object(run: ListedRun) -> dict[str, Any]:
    about = {name: run.result[name] for name in ("recipe", "method", "seed")}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.time))
    epochs = {"epoch": run.epoch, "epochs": run.num_epochs}
    return {"run": str(run.path), **about, "state": run.state, **epochs, "scores": dict(run.scores), "when": when}
