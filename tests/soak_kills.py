"""The kills of the soak test: runs and adapters that are killed at random times and resumed."""

from __future__ import annotations

import collections
import itertools
import random
import shutil
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import adapter_jobs
from crashes import (
    Forked,
    Members,
    Ranks,
    Reader,
    Torchrun,
    WorkClock,
    differences,
    fork,
    is_writing,
    options,
    small_config,
    start,
)
from lab.recipes.test_smoke import smoke_data_config
from papa.cli.main import STOPPED
from papa.lab.config import METHODS, Config
from papa.lab.recipes import RECIPES
from papa.lab.runs import RunDirectory
from papa.storage import read_file

LONGEST_END = 600.0
"""After so many seconds a process that was asked to end counts as hung, and prints where it is."""
SHARE_OF_SPAWNED, SHARE_OF_RANKS, SHARE_OF_TORCHRUN = 0.01, 0.08, 0.007
"""The shares of runs whose workers import everything anew, as outside of this test; of two ranks that are forked; and
of two ranks that torchrun starts. The first and the last take twenty seconds of a processor."""
ENDS = {0, STOPPED, 128 + signal.SIGINT}
"""Exit codes that a signal may lead to, besides the signal itself; 2 when one worker is killed."""
SIGNALS = [signal.SIGKILL] * 5 + [signal.SIGTERM] * 2 + [signal.SIGINT, signal.SIGHUP, signal.SIGHUP, signal.SIGSTOP]


class Job(ABC):
    """Something that is killed and resumed, in a directory."""

    name: str

    @abstractmethod
    def start(self, directory: Path, log: Path) -> Forked:
        """Start or resume it in the plainest way."""

    @abstractmethod
    def start_anyhow(self, directory: Path, log: Path, generator: random.Random) -> tuple[str, Forked, float]:
        """Start or resume it in a random way: which one, its process, and seconds that its start takes besides."""

    @abstractmethod
    def differences(self, whole: Path, killed: Path) -> Iterable[str]:
        """The files that differ from those of an undisturbed one."""

    def is_finished(self, directory: Path) -> bool:
        """Whether there is nothing left to resume."""
        return False

    def check(self, directory: Path) -> int:
        """Read the checkpoints that are there after a kill; returns their number."""
        return 0


@dataclass
class Run(Job):
    """A run of the command line."""

    name: str
    arguments: list[str]
    config: Config | None = None
    """For jobs whose checkpoints are read after each kill."""

    def start(self, directory: Path, log: Path) -> Forked:
        return Forked(start(["run", *self.arguments, "--out", str(directory), "--workers", "1", "--resume"], log))

    def start_anyhow(self, directory: Path, log: Path, generator: random.Random) -> tuple[str, Forked, float]:
        command = ["run", *self.arguments, "--out", str(directory), "--resume"]
        if (directory / "config.json").exists() and generator.random() < 0.5:
            command = ["resume", str(directory)]
        chosen, workers = generator.random(), generator.choice([1, 1, 1, 2, 3])
        if "stacked" in self.name or "--members" not in self.arguments:  # the last bits may depend on workers; too few
            chosen, workers = 1.0, 1
        if chosen < SHARE_OF_TORCHRUN:
            return "of two ranks under torchrun", Torchrun(command), 20.0
        if chosen < SHARE_OF_TORCHRUN + SHARE_OF_RANKS:
            return "of two ranks", Ranks(command, log), 1.0
        if chosen < SHARE_OF_TORCHRUN + SHARE_OF_RANKS + SHARE_OF_SPAWNED:
            command += ["--workers", "2"]
            return "of 2 workers that import everything", Forked(start(command, log)), 20.0
        process = start([*command, "--workers", str(workers)], log, forks_workers=True)
        return f"of {workers} workers", Forked(process), 0.5 * (workers - 1)

    def differences(self, whole: Path, killed: Path) -> Iterable[str]:
        return differences(whole, killed)

    def is_finished(self, directory: Path) -> bool:
        return RunDirectory(directory).is_finished

    def check(self, directory: Path) -> int:
        if self.config is None or not (directory / "checkpoint").exists():
            return 0
        if not hasattr(self, "_reader"):
            self._reader = Reader(self.config)
        return self._reader.read_all(directory)


@dataclass
class Adapter(Job):
    """A training by one of papa's adapters, with the checkpoints of its library; see `adapter_jobs`."""

    name: str

    def start(self, directory: Path, log: Path) -> Forked:
        directory.mkdir(exist_ok=True)
        return Forked(fork(partial(adapter_jobs.run, self.name, directory), log), may_leave_children=True)

    def start_anyhow(self, directory: Path, log: Path, generator: random.Random) -> tuple[str, Forked, float]:
        if self.name == adapter_jobs.MEMBER and generator.random() < 0.3:
            directory.mkdir(exist_ok=True)
            return f"of {self.name}, by its command", Members(adapter_jobs.command(directory)), 12.0
        return f"of {self.name}", self.start(directory, log), 0.0

    def differences(self, whole: Path, killed: Path) -> Iterable[str]:
        names = sorted(file.name for file in (whole / "result").iterdir())
        assert names
        return [name for name in names if read_file(whole / "result" / name) != read_file(killed / "result" / name)]


def run_jobs(data: Path) -> list[Job]:
    """Small runs of every method and every average along trajectories; and a recipe for each data set."""
    small: list[Job] = []
    for name in METHODS:
        often = ["--coupling.every-steps", "7"] if name in ("diloco", "noloco") else []  # else never in so few steps
        small.append(Run(f"method {name}", [*options(8), "--method", name, *often], _small(name)))
    parts = ["--coupling.every-steps", "8", "--coupling.fragments", "2"]
    small.append(Run("diloco in parts", [*options(8), "--method", "diloco", *parts]))
    small += [Run(f"trajectory {kind}", [*options(8), "--trajectory.kind", kind]) for kind in ("swa", "ema")]
    small.append(Run("stacked engine", [*options(8), "--train.engine", "stacked", "--diversity.grid", "none"]))
    recipes: dict[str, Job] = {}
    for name, recipe in RECIPES.items():
        config = smoke_data_config(recipe, data)
        if config.data.name not in recipes and not config.model.name.startswith("timm:"):  # which take minutes
            arguments = [name, "--budget", "smoke", "--data.root", config.data.root]
            recipes[config.data.name] = Run(f"recipe {name}", arguments)
    return [*small, *recipes.values()]


def adapter_jobs_(data: Path) -> list[Job]:
    """Every adapter."""
    return [Adapter(name) for name in adapter_jobs.JOBS]


def _small(method: str) -> Config:
    return replace(small_config(), method=method)


@dataclass
class Kills:
    """Kills jobs at random and resumes them, until the number or the time is reached."""

    folder: Path
    jobs: Sequence[Job]
    seed: int
    num_kills: int
    seconds: float
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    slowest_end: float = 0.0

    def __post_init__(self) -> None:
        self.generator, self.end = random.Random(self.seed), time.monotonic() + self.seconds
        self.durations: dict[str, float] = {}
        self.log = self.folder / "errors.log"

    def run(self) -> None:
        """Kill, resume and compare."""
        for job in itertools.cycle(self.jobs):
            if self._is_over() or self.failures:
                break
            before = self.counts["kills"]
            try:
                self._soak(job)
            except Exception:
                self.failures.append(f"{job.name}:\n{traceback.format_exc()}")
            outcome = self.failures[-1] if self.failures else "same bits"
            sys.stderr.write(f"{job.name}: {self.counts['kills'] - before} kills, {outcome}\n")

    def _is_over(self) -> bool:
        return self.counts["kills"] >= self.num_kills or time.monotonic() > self.end

    def _soak(self, job: Job) -> None:
        """One job, killed some times, resumed to its end and compared."""
        whole, killed = self.folder / job.name.replace(" ", "-"), self.folder / "killed"
        if job.name not in self.durations:
            code, self.durations[job.name] = self._run_to_end(job, whole)
            if code != 0:
                self.failures.append(f"{job.name} does not run:\n{self._errors()}")
                return
            self.counts["jobs"] += 1
        for _ in range(self.generator.randint(5, 15)):
            if self._is_over() or self.failures or job.is_finished(killed):
                break
            self._disturb(job, killed)
        if not self.failures:
            code, _ = self._run_to_end(job, killed)
            found = list(job.differences(whole, killed)) if code == 0 else [f"exit code {code}\n{self._errors()}"]
            if found:
                self.failures.append(f"{job.name}: {', '.join(found)}")
            self.counts["resumed to the same bits"] += not found
        shutil.rmtree(killed, ignore_errors=True)

    def _run_to_end(self, job: Job, directory: Path) -> tuple[int, float]:
        """The exit code of a job that nothing disturbs, and the time of a processor that it took."""
        process, seconds = job.start(directory, self.log), 0.0
        clock = WorkClock(process)
        while process.code() is None and not self._hangs(process, clock, job.name):
            seconds = clock.seconds()
            time.sleep(0.2)
        code = process.code()
        process.end()
        return -1 if code is None else code, seconds

    def _hangs(self, process: Any, clock: WorkClock, what: str) -> bool:
        """Whether a process no longer does anything; then it is ended, and where it was is a failure."""
        if not clock.is_stalled():
            return False
        process.send(signal.SIGABRT, [process.pid, *process.children()])
        time.sleep(2.0)
        self.failures.append(f"{what}: it hangs; stacks:\n{self._errors()}")
        return True

    def _errors(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def _disturb(self, job: Job, killed: Path) -> None:
        """Start or resume a job, and send it a signal at a random time."""
        self.log.unlink(missing_ok=True)
        what, process, extra = job.start_anyhow(killed, self.log, self.generator)
        if self._signal(process, killed, longest=0.6 * self.durations[job.name] + extra):
            self.counts[what] += 1
        if self.generator.random() < 0.3:
            self.counts["checkpoints read after a kill"] += job.check(killed)
        if isinstance(job, Run) and "Traceback" in self._errors():
            self.failures.append(f"{job.name}: a traceback, see below\n{self._errors()}")

    def _signal(self, process: Any, killed: Path, *, longest: float) -> bool:
        """Wait for a random moment of its work, and send a signal; returns whether the process was still there."""
        generator, clock = self.generator, WorkClock(process)
        moment = generator.uniform(0.0, longest)
        while (
            process.code() is None and clock.seconds() < moment and not self._hangs(process, clock, "before a signal")
        ):
            time.sleep(0.05)
        if generator.random() < 0.4:
            while process.code() is None and not is_writing(killed) and clock.seconds() < moment + longest / 2:
                time.sleep(0.01)
            time.sleep(generator.uniform(0.0, 0.02))
        if process.code() is not None:
            process.end()
            self.counts["ended before a signal"] += 1
            return False
        number, target = generator.choice(SIGNALS), generator.choice(["all", "all", "parent", "child"])
        children = process.children()
        self.counts["while a checkpoint was written"] += is_writing(killed)
        if number == signal.SIGSTOP:
            process.send(signal.SIGSTOP, [process.pid, *children])
            time.sleep(generator.uniform(0.0, 1.0))
            process.send(signal.SIGCONT, [process.pid, *children])
            number, target = signal.SIGKILL, "all"
            self.counts["SIGSTOP and SIGCONT first"] += 1
            time.sleep(generator.uniform(0.0, 1.0))
        if target == "child" and not (children and number == signal.SIGKILL):
            target = "parent"
        targets = {
            "all": [process.pid, *children],
            "parent": [process.pid],
            "child": [generator.choice(children or [0])],
        }
        begin = time.monotonic()
        process.send(number, targets[target])
        self.counts["kills"] += 1
        self.counts[f"{number.name} to {target}"] += 1
        self._wait(process, f"{number.name} to {target}", begin)
        return True

    def _wait(self, process: Any, what: str, begin: float) -> None:
        """Wait until no process of the session is left; one that does not end is a failure."""
        while process.code() is None or (not process.may_leave_children and process.children()):
            if time.monotonic() > begin + LONGEST_END:
                process.send(signal.SIGABRT, [process.pid, *process.children()])
                time.sleep(2.0)
                self.failures.append(f"{what}: not ended after {LONGEST_END:g} seconds; stacks:\n{self._errors()}")
                break
            time.sleep(0.05)
        self.slowest_end = max(self.slowest_end, time.monotonic() - begin)
        code = process.code()
        expected = ENDS | ({2} if "child" in what else set())
        is_known = not (process.has_own_codes or process.may_leave_children)
        if is_known and code is not None and code >= 0 and code not in expected:
            self.failures.append(f"{what}: exit code {code}\n{self._errors()}")
        process.end()
