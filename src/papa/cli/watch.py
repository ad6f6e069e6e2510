"""`papa watch RUN`: follow a run from another terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.live import Live

from papa.cli import arguments as command_arguments
from papa.cli.status import Clock, RunStatus, status_line, status_view
from papa.cli.tables import print_table
from papa.errors import ConfigError, RunError
from papa.lab.report.metric import advice_on_epoch, metric_of
from papa.lab.report.table import COLUMNS, run_rows
from papa.lab.report.words import plain, printable
from papa.lab.result import parsed_event
from papa.lab.runs import RunDirectory, is_run

DESCRIPTION = """Follows a run from another terminal until it has finished: losses, scores and distances of the members,
scores of the ensemble and the average soup, and the remaining time. Waits for a directory that does not exist yet, and
for a stopped run to be resumed. Ctrl-C stops watching; the run continues.

examples:
  papa watch runs/digits-papa-seed1
  papa watch runs/digits-papa-seed1 --once"""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `papa watch`."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the current status and exit."""
    every: float = 1.0
    """Seconds between updates."""


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    if not options.every > 0:
        raise ConfigError(f"--every is {options.every}, expected more than 0 seconds")
    try:
        _watch(options)
    except KeyboardInterrupt:  # how a user stops watching
        return 0
    return 0


def parse_options(arguments: Sequence[str]) -> WatchOptions:
    """The options, parsed by tyro, which exits with code 2 and a message when they are wrong."""
    return command_arguments.parse_options(WatchOptions, arguments, prog="papa watch", description=DESCRIPTION)


def _watch(options: WatchOptions) -> None:
    run = RunDirectory(options.directory)
    follower = Follower(run)
    if not is_run(run.path):
        _check_holds_no_runs(run.path)
        print(f"there is no run in {options.directory} yet" + ("" if options.once else ": waiting for it"), flush=True)
        if options.once:
            return
    console = Console(highlight=False)
    live = Live(console=console, get_renderable=lambda: status_view(follower.status), transient=not options.once)
    shown: tuple[int, str | None] | None = None
    try:
        while not run.is_finished:
            follower.read()
            status = follower.status
            if follower.has_started and console.is_terminal and not live.is_started:
                live.start()
            elif follower.has_started and not console.is_terminal and (status.epoch, status.interruption) != shown:
                shown = (status.epoch, status.interruption)
                print(status_line(status), *status.warnings, sep="\n", flush=True)
            if options.once:
                return
            time.sleep(options.every)
    finally:
        live.stop()
    result = run.read_result()
    print_table((result["method"], *COLUMNS), run_rows(result))
    print(f"report: {run.report}")


def _check_holds_no_runs(path: Path) -> None:
    inside = [child for child in path.iterdir() if is_run(child)] if path.is_dir() else []
    if inside:
        newest = max(inside, key=lambda child: child.stat().st_mtime)
        raise ConfigError(f"{path} contains {len(inside)} runs: watch one of them, such as {newest}")


class Follower:
    """Reads the lines that a run appends to its metrics, and keeps its status.

    An incomplete line is read when it is complete. A file that was replaced, as by a resumed run, is read again.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.status = RunStatus(str(run.path))
        self._clock = Clock()
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._known: Mapping[str, Any] = {}

    @property
    def has_started(self) -> bool:
        return self.status.num_epochs is not None

    def read(self) -> None:
        if not self.run.config.exists():
            return
        if not self.has_started:
            self._read_config()
        for line in self._new_lines():
            try:
                event = parsed_event(line)
            except ValueError:  # what is no event cannot be shown; reports name the line
                continue
            self._update(event)
        is_stopped = self.run.is_interrupted
        self.status.interruption = f"not running: continue it with papa resume {self.run.path}" if is_stopped else None
        self.status.seconds_left = None if is_stopped else self._clock.seconds_left(self.status.share)

    def _read_config(self) -> None:
        known = self.run.read_result_so_far()
        self._known = known
        self.status.title = printable(f"{known['recipe']} {known['method']} seed {known['seed']}")
        self.status.digits = metric_of([known]).digits
        self.status.num_epochs = (known["config"].get("train") or {}).get("epochs") or 0

    def _new_lines(self) -> list[bytes]:
        """The complete lines since the last call."""
        try:
            with self.run.metrics.open("rb") as file:
                stat = os.fstat(file.fileno())
                if self._file != (stat.st_dev, stat.st_ino) or stat.st_size < self._offset:
                    self._file, self._offset = (stat.st_dev, stat.st_ino), 0
                    self.status.epoch, self.status.step, self.status.warnings = 0, 0, []
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"cannot read {self.run.metrics}: {error.strerror or error}") from error
        lines = added[: added.rfind(b"\n") + 1]
        self._offset += len(lines)
        return lines.splitlines()

    def _update(self, event: Mapping[str, Any]) -> None:
        status, kind, step = self.status, event["event"], event.get("step", 0)
        status.step = max(status.step, int(step))
        if kind == "epoch" and (epoch := event.get("epoch")):
            status.epoch = int(epoch)
            if status.num_epochs and step:
                status.num_steps = round(step / epoch * status.num_epochs)
            status.losses, status.scores = event.get("losses", ()), event.get("validation", ())
            status.distances = event.get("distances", ())
            status.ensemble = event.get("validation_ensemble")
            status.average_soup = event.get("validation_average_soup")
            status.advice = advice_on_epoch(self._known, event)
        elif kind == "nonfinite":
            status.warnings.append(f"step {plain(step)}: member {plain(event.get('member'))} was unhealthy")
        elif kind == "checkpoint-failed":
            status.warnings.append(f"step {plain(step)}: the checkpoint could not be written")
