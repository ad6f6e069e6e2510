"""`papa watch DIR`: follow a run from another terminal."""

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

from papa.cli.status import Clock, RunStatus, status_line, status_view
from papa.cli.tables import print_table
from papa.errors import ConfigError, RunError
from papa.lab.report import COLUMNS, run_rows
from papa.lab.report.fields import number, numbers, part, printable, text
from papa.lab.report.reading import is_run, parse_events, read_run
from papa.lab.runs import RunDirectory

USAGE = """usage: papa watch DIR [--once] [--every SECONDS]

Follows a run from another terminal until it has finished: members' losses, scores and distances, and the time left.
A directory that is not there yet is waited for, and so is a run that was broken off, until it is resumed. Stop with
Ctrl-C; the run goes on.

  --once            show where the run stands, and stop
  --every SECONDS   how often to look, 1 by default

examples:
  papa watch runs/digits-papa-seed1
  papa watch runs/digits-papa-seed1 --once
"""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `papa watch`."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run."""
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show where the run stands, and stop."""
    every: float = 1.0
    """How often to look, in seconds."""


def main(arguments: Sequence[str]) -> int:
    """Follow a run until it has finished."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    options = parse_options(arguments)
    if not options.every > 0:
        raise ConfigError(f"--every is {options.every}, expected seconds, more than 0")
    try:
        _watch(options)
    except KeyboardInterrupt:  # the way out
        return 0
    return 0


def parse_options(arguments: Sequence[str]) -> WatchOptions:
    """The options, checked by tyro, which exits with 2 and a message when they are wrong."""
    if not any(not argument.startswith("-") for argument in arguments):
        raise ConfigError(f"a directory is missing\n{USAGE}".rstrip())
    return tyro.cli(WatchOptions, prog="papa watch", args=list(arguments))


def _watch(options: WatchOptions) -> None:
    run = RunDirectory(options.directory)
    follower = Follower(run)
    if not is_run(run.path):
        _check_holds_no_runs(run.path)
        print(f"there is no run in {options.directory} yet" + ("" if options.once else ": waiting for it"), flush=True)
        if options.once:
            return
    console = Console(highlight=False)
    live = Live(console=console, get_renderable=lambda: status_view(follower.standing), transient=not options.once)
    shown: tuple[int, str | None] | None = None
    try:
        while not run.is_finished:
            follower.look()
            if follower.has_begun and console.is_terminal and not live.is_started:
                live.start()
            stands = (follower.standing.epoch, follower.standing.halt)
            if follower.has_begun and not console.is_terminal and stands != shown:
                shown = stands
                print(status_line(follower.standing), *follower.standing.notes, sep="\n", flush=True)
            if options.once:
                return
            time.sleep(options.every)
    finally:
        live.stop()
    result = read_run(options.directory).result
    print_table((text(result.get("method")), *COLUMNS), run_rows(result))
    print(f"report: {run.report}")


def _check_holds_no_runs(path: Path) -> None:
    inside = [child for child in sorted(path.iterdir()) if is_run(child)] if path.is_dir() else []
    if inside:
        newest = max(inside, key=lambda child: child.stat().st_mtime)
        raise ConfigError(f"{path} holds {len(inside)} runs: watch one of them, such as {newest}")


class Follower:
    """Reads what a run adds to its metrics, and knows where it stands.

    Lines that are half written are read when they are whole; a file that was replaced, as a resumed run does, is read
    anew.

    Args:
        run: the run, there or not.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.standing = RunStatus(str(run.path))
        self._clock = Clock()
        self._begin()

    def _begin(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""

    @property
    def has_begun(self) -> bool:
        """Whether anything is known of the run."""
        return self.standing.num_epochs is not None

    def look(self) -> None:
        """Read what is new."""
        if not self.run.config.exists():
            return
        if not self.has_begun:
            self._read_config()
        for event in parse_events(self._new_lines()):
            self._take(event)
        is_halted = self.run.is_interrupted
        self.standing.halt = f"nobody is training it: papa resume {self.run.path} goes on" if is_halted else None
        self.standing.seconds_left = None if is_halted else self._clock.seconds_left(self.standing.share)

    def _read_config(self) -> None:
        config = read_run(self.run.path).result.get("config")
        told = (part(config, key) for key in ("recipe", "method"))
        self.standing.title = printable(" ".join([*map(text, told), f"seed {text(part(config, 'seed'))}"]))
        self.standing.num_epochs = int(number(part(config, "train", "epochs")) or 0)

    def _new_lines(self) -> list[bytes]:
        """The whole lines added since last time."""
        try:
            with self.run.metrics.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                    self._begin()
                    self._file = (status.st_dev, status.st_ino)
                    self.standing.epoch, self.standing.step, self.standing.notes = 0, 0, []
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"cannot read {self.run.metrics}: {error.strerror or error}") from error
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        return lines

    def _take(self, event: Mapping[str, Any]) -> None:
        standing, step = self.standing, number(event.get("step"))
        standing.step = standing.step if step is None else max(standing.step, int(step))
        if event.get("event") == "epoch" and (epoch := number(event.get("epoch"))):
            standing.epoch = int(epoch)
            if standing.num_epochs and step:
                standing.num_steps = round(step / epoch * standing.num_epochs)
            standing.losses, standing.scores = numbers(event.get("losses")), numbers(event.get("validation"))
            standing.distances = numbers(event.get("distances"))
            standing.ensemble = number(event.get("validation_ensemble"))
        elif event.get("event") == "nonfinite":
            standing.notes.append(f"step {text(event.get('step'))}: member {text(event.get('member'))} fell sick")
        elif event.get("event") == "checkpoint-failed":
            standing.notes.append(f"step {text(event.get('step'))}: no checkpoint could be written")
