"""A soak test, too long for the test suite: kills, averagings and altered files by the thousand.

    python tests/soak.py --minutes 60

An hour, on two free cores, is for 1,000 kills of runs, each resumed until it ends with the bits of a run that nothing
disturbed; for 100,000 averagings without growth of memory; and for 100,000 altered files. Less time: less of each.
Methods, recipes and data sets come from papa's own lists. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alterations import alter, kinds
from crashes import Forked, Reader, Torchrun, differences, is_writing, options, run_to_end, small_config
from lab.recipes.test_smoke import smoke_data_config, write_data
from papa.cli.main import STOPPED
from papa.lab.config import METHODS, TRAJECTORIES, Config
from papa.lab.recipes import RECIPES
from papa.lab.recipes.build import build
from papa.lab.runs import RunDirectory

KILLS, AVERAGINGS, FILES = 1000, 100_000, 100_000
"""What an hour is for."""
SHARES = {"kills": 0.65, "averagings": 0.1, "files": 0.25}
"""The shares of time."""
MOST_GROWTH = 1.05
"""The allowed ratio of resident memory after all averagings to that after a tenth of them."""
MOST_EXTRA_MEGABYTES = 500.0
"""The allowed growth of memory while altered files of one kind are read."""
MOST_SECONDS = 10.0
"""The allowed time of a processor for one altered file."""
LONGEST_END = 600.0
"""After so many seconds a process that was asked to end counts as hung, and prints where it is."""
SHARE_OF_RECIPES, SHARE_OF_RANKS = 0.15, 0.05
PRELOADED = ["crashes", "alterations"]
"""Modules of the server that forks processes."""
ENDS = {0, STOPPED, 128 + signal.SIGINT}
"""Exit codes that a signal may lead to, besides the signal itself; 2 when one worker is killed."""


class Row(NamedTuple):
    """One line of the summary."""

    name: str
    value: object
    is_good: bool = True


@dataclass(frozen=True)
class Job:
    """A run that is killed and resumed."""

    name: str
    arguments: list[str]
    config: Config | None = None
    """For jobs whose checkpoints are read after each kill."""


def jobs(data: Path) -> tuple[list[Job], list[Job]]:
    """Small runs of every method and every average along trajectories; and the recipes on tiny data."""
    small = [Job(f"method {name}", [*options(8), "--method", name], _small(name)) for name in METHODS]
    small += [
        Job(f"trajectory {kind}", [*options(8), "--trajectory.kind", kind]) for kind in TRAJECTORIES if kind != "none"
    ]
    small.append(Job("delayed pushes", [*options(8), "--average.every-steps", "5", "--average.delay", "2"]))
    small.append(Job("stacked engine", [*options(8), "--train.engine", "stacked", "--diversity.grid", "none"]))
    recipes = []
    for name, recipe in RECIPES.items():
        config = smoke_data_config(recipe, data)
        if config.model.name.startswith("timm:"):  # minutes each, and nothing that the others do not have
            continue
        recipes.append(Job(f"recipe {name}", [name, "--budget", "smoke", "--data.root", config.data.root]))
    return small, recipes


def _small(method: str) -> Config:
    return replace(small_config(), method=method)


@dataclass
class Kills:
    """Kills runs at random and resumes them, until the number or the time is reached."""

    folder: Path
    seed: int
    num_kills: int
    seconds: float
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    slowest_end: float = 0.0

    def __post_init__(self) -> None:
        self.generator, self.began = random.Random(self.seed), time.monotonic()
        self.durations: dict[str, float] = {}
        self.readers: dict[str, Reader] = {}
        self.log = self.folder / "errors.log"
        write_data(self.folder / "data")
        self.small, self.recipes = jobs(self.folder / "data")
        self.generator.shuffle(self.small)
        self.generator.shuffle(self.recipes)

    def run(self) -> list[Row]:
        """Kill, resume and compare."""
        turns = itertools.count()
        while not self._is_over() and not self.failures:
            turn = next(turns)
            is_recipe = self.generator.random() < SHARE_OF_RECIPES
            pool = self.recipes if is_recipe and self.recipes else self.small
            self._soak(pool[turn % len(pool)])
        kinds_of_kill = {name: number for name, number in self.counts.items() if name.startswith("SIG")}
        others = {name: number for name, number in self.counts.items() if not name.startswith("SIG")}
        return [
            Row("kills", f"{self.counts['kills']} of {self.num_kills} in {self._minutes():.1f} minutes"),
            Row("... by signal and target", _listing(kinds_of_kill)),
            Row("... and what else was counted", _listing(others)),
            Row("longest time from a signal to the end of all processes, seconds", f"{self.slowest_end:.1f}"),
            Row("different bits, hangs, tracebacks and other failures", self.failures or "none", not self.failures),
        ]

    def _minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def _is_over(self) -> bool:
        return self.counts["kills"] >= self.num_kills or self._minutes() * 60 > self.seconds

    def _soak(self, job: Job) -> None:
        """One run, killed some times, resumed to its end and compared."""
        whole, killed = self.folder / job.name.replace(" ", "-"), self.folder / "killed"
        if job.name not in self.durations:
            begin = time.monotonic()
            if run_to_end(["run", *job.arguments, "--out", str(whole), "--workers", "1"], self.log) != 0:
                self.failures.append(f"{job.name} does not run:\n{self.log.read_text()[-3000:]}")
                return
            self.durations[job.name] = time.monotonic() - begin
            self.counts["jobs"] += 1
        num_members = len(list((whole / "members").iterdir()))
        for _ in range(self.generator.randint(3, 8)):
            if self._is_over() or self.failures or RunDirectory(killed).is_finished:
                break
            self._disturb(job, killed, num_members)
        if not self.failures:
            self._finish(job, whole, killed)
        shutil.rmtree(killed, ignore_errors=True)

    def _finish(self, job: Job, whole: Path, killed: Path) -> None:
        code = run_to_end(["run", *job.arguments, "--out", str(killed), "--workers", "1", "--resume"], self.log)
        found = list(differences(whole, killed)) if code == 0 else [f"exit code {code}"]
        if found:
            self.failures.append(f"{job.name}: {', '.join(found)}")
        self.counts["finished runs"] += 1

    def _disturb(self, job: Job, killed: Path, num_members: int) -> None:
        """Start or resume a run, and send it a signal at a random time."""
        workers = self.generator.choice([1, 1, 1, 2, 3])
        is_stacked = "stacked" in job.name  # its last bits depend on the number of workers
        workers = 1 if is_stacked else min(workers, num_members)
        arguments = [*job.arguments, "--out", str(killed), "--resume"]
        if (killed / "config.json").exists() and self.generator.random() < 0.5:
            arguments = []
        command = ["run", *arguments] if arguments else ["resume", str(killed)]
        if num_members > 1 and not is_stacked and self.generator.random() < SHARE_OF_RANKS:
            self.counts["of two ranks under torchrun"] += 1
            self._signal(Torchrun(command), killed, longest=self.durations[job.name] + 20.0)
        else:
            self.counts[f"of {workers} workers"] += 1
            longest = self.durations[job.name] / 2 + (0.0 if workers == 1 else 8.0)
            self._signal(Forked([*command, "--workers", str(workers)], self.log), killed, longest=longest)
        if job.config is not None and (killed / "checkpoint").exists():
            reader = self.readers.setdefault(job.name, Reader(job.config))
            self.counts["checkpoints read after a kill"] += reader.read_all(killed)
        if self.log.exists() and "Traceback" in self.log.read_text():
            self.failures.append(f"{job.name}: a traceback, see below\n{self.log.read_text()[-3000:]}")
        self.log.unlink(missing_ok=True)

    def _signal(self, process: Any, killed: Path, *, longest: float) -> None:
        generator = self.generator
        begin = time.monotonic()
        end = begin + generator.uniform(0.0, longest)
        while process.code() is None and time.monotonic() < end:
            time.sleep(0.001)
        if generator.random() < 0.4:
            while process.code() is None and not is_writing(killed) and time.monotonic() < begin + 2 * longest:
                time.sleep(0.0005)
            time.sleep(generator.uniform(0.0, 0.004))
        if process.code() is not None:
            process.end()
            return
        number = generator.choice(
            [signal.SIGKILL] * 5 + [signal.SIGTERM] * 2 + [signal.SIGINT, signal.SIGHUP, signal.SIGHUP, signal.SIGSTOP]
        )
        target = generator.choice(["all", "all", "parent", "child"])
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

    def _wait(self, process: Any, what: str, begin: float) -> None:
        """Wait until no process of the session is left; one that does not end is a failure."""
        while process.code() is None or (process.children() and not process.may_leave_children):
            if time.monotonic() > begin + LONGEST_END:
                process.send(signal.SIGABRT, [process.pid, *process.children()])
                self.failures.append(f"{what}: not ended after {LONGEST_END:g} seconds; stacks are below")
                time.sleep(2.0)
                break
            time.sleep(0.01)
        self.slowest_end = max(self.slowest_end, time.monotonic() - begin)
        code = process.code()
        expected = ENDS | ({2} if "child" in what else set())
        if not process.may_leave_children and code is not None and code >= 0 and code not in expected:
            self.failures.append(f"{what}: exit code {code}")
        process.end()


def _listing(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in sorted(counts.items()))


def resident_megabytes() -> float:
    """The resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def average_often(method: str, num_averagings: int, seconds: float) -> dict[str, Any]:
    """Average a population many times; returns the memory after a tenth and at the end."""
    config = _small(method)
    average = replace(config.average, every_steps=1, every_epochs=1e-6, repair=0)
    training = build(replace(config, average=average, train=replace(config.train, epochs=10**7)))
    begin, first, count = time.monotonic(), 0.0, 0
    while count < num_averagings and time.monotonic() < begin + seconds:
        training.averager.step()
        count = training.averager.num_averagings
        if not first and (count >= num_averagings / 10 or time.monotonic() > begin + seconds / 10):
            first = resident_megabytes()
    return {"averagings": count, "first": first, "last": resident_megabytes()}


def soak_averagings(num_averagings: int, seconds: float) -> list[Row]:
    """Every method, each in its own process."""
    rows, total, worst = [], 0, 0.0
    methods = [method for method in METHODS if method != "independent"]
    for method in methods:
        found = in_process(average_often, method, num_averagings // len(methods) + 1, seconds / len(methods))
        if isinstance(found, str):
            rows.append(Row(f"averagings of {method}", found, False))
            continue
        total, worst = total + found["averagings"], max(worst, found["last"] / found["first"])
    steps = f"{total} of {num_averagings}"
    rows.append(Row(f"averagings by {len(methods)} methods", steps))
    rows.append(Row("worst growth of memory from a tenth of them to the end", f"{worst:.3f}", worst <= MOST_GROWTH))
    return rows


def read_altered(kind: str, folder: str, num_files: int, seconds: float, seed: int) -> dict[str, Any]:
    """Read altered files of one kind."""
    outcomes = alter(kinds()[kind](Path(folder) / "files"), random.Random(seed))
    next(outcomes)
    counts, slowest, begin = collections.Counter[bool](), 0.0, time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while sum(counts.values()) < num_files and time.monotonic() < begin + seconds:
        before = time.process_time()
        counts[next(outcomes)] += 1
        slowest = max(slowest, time.process_time() - before)
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return {"refused": counts[True], "accepted": counts[False], "slowest": slowest, "extra": extra}


def soak_files(folder: Path, num_files: int, seconds: float, seed: int) -> list[Row]:
    """Every kind of file, each in its own process, which must not die."""
    names, rows, total = list(kinds()), [], 0
    for number, kind in enumerate(names):
        place = folder / f"kind-{number}"
        place.mkdir()
        share = (num_files // len(names) + 1, seconds / len(names))
        found = in_process(read_altered, kind, str(place), *share, seed)
        shutil.rmtree(place)
        if isinstance(found, str):
            rows.append(Row(f"altered: {kind}", found, False))
            continue
        total += found["refused"] + found["accepted"]
        text = f"{found['refused']} refused, {found['accepted']} read; at most {found['slowest']:.2f} s and "
        text += f"{found['extra']:.0f} MB more"
        is_good = found["slowest"] <= MOST_SECONDS and found["extra"] <= MOST_EXTRA_MEGABYTES
        rows.append(Row(f"altered: {kind}", text, is_good))
    return [Row("altered files", f"{total} of {num_files}"), *rows]


def in_process(job: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | str:
    """What a function returns in a process of its own, or how that ended; forked, which saves the time of imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, job, arguments))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] | str = receiver.recv()
    except EOFError:
        process.join()
        found = f"the process ended with code {process.exitcode}"
    process.join()
    return found


def _send(sender: Any, job: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(job(*arguments))
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}"[:2000])


def main() -> None:
    """Run the soak test and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; all numbers are proportional to it")
    parser.add_argument("--only", choices=SHARES, help="one part, for all of the time")
    parser.add_argument("--seed", type=int, default=1, help="seed of kills and alterations")
    chosen = parser.parse_args()
    shares = SHARES if chosen.only is None else {chosen.only: 1.0}
    scale, seconds = chosen.minutes / 60, {name: share * chosen.minutes * 60 for name, share in shares.items()}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="papa-soak-") as temporary:
        folder = Path(temporary)
        if "averagings" in shares:
            rows += soak_averagings(int(AVERAGINGS * scale), seconds["averagings"])
        if "files" in shares:
            rows += soak_files(folder, int(FILES * scale), seconds["files"], chosen.seed)
        if "kills" in shares:
            (folder / "kills").mkdir()
            rows += Kills(folder / "kills", chosen.seed, int(KILLS * scale), seconds["kills"]).run()
    today, machine = time.strftime("%Y-%m-%d", time.gmtime()), f"{os.cpu_count()} processors, {platform.platform()}"
    rows.insert(0, Row("date, machine", f"{today}, {machine}, torch {torch.__version__}"))
    width = max(len(row.name) for row in rows)
    for row in rows:
        sys.stdout.write(f"{row.name:{width}}  {row.value}{'' if row.is_good else '   FAILED'}\n")
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
