"""Killing real runs at random times; shared by the crash test and the soak test."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import fork_server
from papa.checkpoint import Expected, checkpoints, load_checkpoint
from papa.cli import main
from papa.lab.config import Config
from papa.lab.recipes import find
from papa.lab.recipes.build import build
from papa.lab.runs import RunDirectory
from papa.storage import read_file

OPTIONS = ["--members", "3", "--train.batch-size", "32", "--average.repair", "1"]


def options(num_epochs: int) -> list[str]:
    """Options of a small run."""
    return ["digits", *OPTIONS, "--train.epochs", str(num_epochs)]


def small_config() -> Config:
    """The same as a config, except for the number of epochs."""
    config = replace(find("digits").config(), members=3)
    return replace(config, train=replace(config.train, batch_size=32))


def _in_child(arguments: list[str], log: Path | None) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a process that hangs is ended by SIGABRT, and says where it was
    faulthandler.enable()
    os._exit(main(arguments))


def start(arguments: list[str], log: Path | None = None) -> BaseProcess:
    """The command line in a separate process and session, with its errors in a file.

    To save the time of imports it is forked, see `fork_server`.
    """
    process = fork_server.context().Process(target=_in_child, args=(arguments, log))
    process.start()
    return process


def run_to_end(arguments: list[str], log: Path | None = None) -> int:
    """Run the command line in a separate process and return its exit code."""
    process = start(arguments, log)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill_at(process: BaseProcess, path: Path, generator: random.Random, longest: float) -> bool:
    """Kill a process at a random time, half of the times while it writes; returns whether it was still alive."""
    begin = time.monotonic()
    end = begin + generator.uniform(0.0, longest)
    while process.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    if generator.random() < 0.5:
        while process.is_alive() and not is_writing(path) and time.monotonic() < begin + 2 * longest:
            time.sleep(0.0002)
        time.sleep(generator.uniform(0.0, 0.004))
    was_alive = process.is_alive()
    if was_alive:
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return was_alive and process.exitcode == -signal.SIGKILL


def processes() -> Iterator[tuple[int, int, int]]:
    """Every process that is alive, with its parent and its session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended
            continue
        if state != "Z":
            yield int(path.parent.name), int(parent), int(session)


class Forked:
    """The command line in a process that is forked, which saves the time of imports."""

    may_leave_children = False

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._process = start(arguments, log)
        self.pid = self._process.pid or 0

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def send(self, number: int, targets: list[int]) -> None:
        """Send a signal to some processes, as far as they are alive."""
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)

    def children(self) -> list[int]:
        """The other processes of its session."""
        return [pid for pid, _, session in processes() if session == self.pid != pid]

    def end(self) -> None:
        """End what is left of it."""
        self.send(signal.SIGKILL, [*self.children(), *([self.pid] if self.code() is None else [])])
        self._process.join()


class Torchrun(Forked):
    """The command line under torchrun with two ranks."""

    may_leave_children = True  # when torchrun is killed, its processes are not

    def __init__(self, command: list[str]) -> None:
        arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        arguments += ["-m", "papa", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # torchrun prints tracebacks of its own
        self._started = subprocess.Popen(arguments, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload]
        self.pid = self._started.pid
        self._ranks: set[int] = set()

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code: int | None = self._started.poll()
        return code

    def children(self) -> list[int]:
        """The ranks, which have sessions of their own, also those that outlived torchrun."""
        self._ranks |= {pid for pid, parent, _ in processes() if parent == self.pid}
        return [pid for pid, _, _ in processes() if pid in self._ranks]

    def end(self) -> None:
        """End what is left of it."""
        self.send(signal.SIGKILL, [*self.children(), *([self.pid] if self.code() is None else [])])
        self._started.wait()


def is_writing(path: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((path / "checkpoint").glob(".step-*.partial"))


class Reader:
    """Reads every checkpoint of a run, as in a resume."""

    def __init__(self, config: Config) -> None:
        training = build(config)
        self.num_members = config.members
        self.expected = {
            member: Expected(model, optimizer)
            for member, model, optimizer in zip(training.members, training.population, training.optimizers, strict=True)
        }

    def read_all(self, path: Path) -> int:
        """The number of checkpoints; raises if one cannot be read."""
        found = checkpoints(RunDirectory(path).checkpoints)
        for _, checkpoint in found:
            dict(load_checkpoint(checkpoint, self.expected, num_members=self.num_members).members)
        return len(found)


def differences(first: Path, second: Path) -> Iterator[str]:
    """The files of two finished runs that are not bitwise equal."""
    names = ["soup.safetensors", "greedy.safetensors"]
    names += [f"members/{file.name}" for file in sorted((first / "members").iterdir())]
    for name in names:
        if read_file(first / name) != read_file(second / name):
            yield name
    if metrics_of(first) != metrics_of(second):
        yield "metrics.jsonl"


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without durations, which always differ."""
    return [
        {key: value for key, value in event.items() if key != "seconds"} for event in RunDirectory(path).read_metrics()
    ]
