"""Killing real runs at random times; shared by the crash test and the soak test."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import fork_server
import papa.distributed.start
from papa.cli import main
from papa.lab.config import Config
from papa.lab.recipes import find
from papa.lab.recipes.build import build
from papa.lab.runs import RunDirectory
from papa.storage import read_file
from papa.training.checkpoints import checkpoints, expected_states, load_checkpoint

OPTIONS = ["--members", "3", "--train.batch-size", "32", "--average.repair", "1"]


def options(num_epochs: int) -> list[str]:
    """Options of a small run."""
    return ["digits", *OPTIONS, "--train.epochs", str(num_epochs)]


def small_config() -> Config:
    """The same as a config, except for the number of epochs."""
    config = replace(find("digits").config(), members=3)
    return replace(config, train=replace(config.train, batch_size=32))


def in_child(job: Callable[[], int], log: Path | None) -> None:
    """Run a job in a session of its own, as a new process would, and exit with its code."""
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
    code = 1
    try:
        code = job()
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _command(arguments: list[str], forks_workers: bool, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    if forks_workers:
        papa.distributed.start.worker_context = partial(multiprocessing.get_context, "fork")
    return main(arguments)


def start(
    arguments: list[str],
    log: Path | None = None,
    *,
    forks_workers: bool = False,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """The command line in a separate process and session, with its errors in a file.

    To save the time of imports it is forked, see `fork_server`. With `forks_workers` its workers are too: a
    process that was forked and has done nothing yet may be forked again.
    """
    return fork(partial(_command, arguments, forks_workers, dict(environment or {})), log)


def fork(job: Callable[[], int], log: Path | None = None) -> BaseProcess:
    """A job, which must be picklable, in a process that is forked from the server."""
    process = fork_server.context().Process(target=in_child, args=(job, log))
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


class Family:
    """The processes that belong to one: in its session, or its children.

    Every process of the machine is looked at once only, since a look at all of them takes long.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._seen, self._family = {process}, set[int]()

    def alive(self) -> list[int]:
        """Those that are alive now."""
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in self._seen:
                self._seen.add(int(name))
                fields = _stat(int(name))
                if fields and self._process in (int(fields[1]), int(fields[3])):
                    self._family.add(int(name))
        self._family = {process for process in self._family if _stat(process)[:1] not in ([], ["Z"])}
        return sorted(self._family)


def _stat(process: int) -> list[str]:
    """State, parent, group, session and so on of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(process: int) -> float:
    """The time of a processor that a process has used; 0 if it has ended."""
    fields = _stat(process)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


class WorkClock:
    """The time of a processor that a process and its children have used, which does not depend on other programs."""

    def __init__(self, process: Forked) -> None:
        self._process, self._used, self._next_look = process, {process.pid: 0.0}, 0.0
        self._mark = time.monotonic(), 0.0

    def is_stalled(self) -> bool:
        """Whether they have done next to nothing for two minutes, which no load of the machine explains."""
        (begin, before), now = self._mark, time.monotonic()
        if now < begin + 120.0:
            return False
        self._mark = now, self.seconds()
        return self._mark[1] < before + 0.5

    def seconds(self) -> float:
        """The time until now, as far as it was asked for while they were alive."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + 0.3
            self._used |= {child: 0.0 for child in self._process.children() if child not in self._used}
        for process in self._used:
            self._used[process] = max(self._used[process], cpu_seconds(process))
        return sum(self._used.values())


class Forked:
    """A process that is forked, which saves the time of imports.

    Args:
        process: what `start` or `fork` returned.
        may_leave_children: whether its children may outlive it.
    """

    has_own_codes = False
    """Whether its exit codes are those of something else than papa."""

    def __init__(self, process: BaseProcess, *, may_leave_children: bool = False) -> None:
        self._process, self.may_leave_children = process, may_leave_children
        self.pid = self._process.pid or 0
        self._family = Family(self.pid)

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def send(self, number: int, targets: list[int]) -> None:
        """Send a signal to some processes, as far as they are alive."""
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)

    def children(self) -> list[int]:
        """Its children, also those that outlived it, and the other processes of its session."""
        return self._family.alive()

    def end(self) -> None:
        """End what is left of it."""
        self.send(signal.SIGKILL, [*self.children(), *([self.pid] if self.code() is None else [])])
        self._process.join()


class Ranks(Forked):
    """The command line in two ranks that are forked, with the variables that torchrun sets."""

    def __init__(self, command: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
        names |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [{**names, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        first, self._other = (start(command, log, environment=variables) for variables in ranks)
        super().__init__(first, may_leave_children=True)  # torchrun would end the other one

    def children(self) -> list[int]:
        """The other rank."""
        return [self._other.pid or 0] if self._other.is_alive() else []

    def end(self) -> None:
        """End what is left of it."""
        super().end()
        self._other.join()


class Torchrun(Forked):
    """The command line under torchrun with two ranks."""

    may_leave_children = True  # when torchrun is killed, its processes are not
    has_own_codes = True

    def __init__(self, command: list[str]) -> None:
        arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self._start([*arguments, "-m", "papa", *command])

    def _start(self, arguments: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # torchrun prints tracebacks of its own
        self._started = subprocess.Popen(arguments, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload]
        self.pid = self._started.pid
        self._family = Family(self.pid)

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code: int | None = self._started.poll()
        return code

    def end(self) -> None:
        """End what is left of it."""
        self.send(signal.SIGKILL, [*self.children(), *([self.pid] if self.code() is None else [])])
        self._started.wait()


class Members(Torchrun):
    """A command with `papa.member`, whose processes end also when torchrun is killed."""

    may_leave_children = False

    def __init__(self, command: list[str]) -> None:
        self._start(command)


def is_writing(path: Path) -> bool:
    """Whether a checkpoint is being written."""
    try:
        return any(name.startswith(".step-") for name in os.listdir(path / "checkpoint"))
    except FileNotFoundError:
        return False


class Reader:
    """Reads every checkpoint of a run, as in a resume."""

    def __init__(self, config: Config) -> None:
        training = build(config.settled)
        self.num_members = training.population.size
        self.expected = expected_states(training)

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
