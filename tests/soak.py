"""A soak test, too long for the test suite: kills, averagings and altered files by the thousand.

    python tests/soak.py --minutes 60

An hour, on two free cores, is for 1,000 kills of runs and adapters, each resumed until it ends with the bits of one
that nothing disturbed; for 100,000 averagings without growth of memory; and for 100,000 altered files. Less time:
less of each. Methods, recipes and data sets come from papa's own lists. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fork_server
from adapter_jobs import LIBRARIES
from alterations import alter, kinds
from crashes import small_config
from lab.recipes.test_smoke import write_data
from papa.lab.config import COUPLINGS, METHODS
from papa.lab.recipes.build import build
from soak_kills import Job, Kills, adapter_jobs_, run_jobs

NUMBERS = {"kills": 900, "adapters": 100, "averagings": 100_000, "files": 100_000}
"""What an hour is for."""
SHARES = {"kills": 0.5, "adapters": 0.15, "averagings": 0.1, "files": 0.25}
"""The shares of time."""
MOST_GROWTH = 1.05
"""The allowed ratio of resident memory after all averagings to that after a tenth of them."""
MOST_EXTRA_MEGABYTES = 500.0
"""The allowed growth of memory while altered files of one kind are read."""
MOST_SECONDS = 10.0
"""The allowed time of a processor for one altered file."""
MOST_OF_A_KIND = 0.16
"""The largest share of one method or kind of file: all get the same time, and some take a hundred times longer."""


class Row(NamedTuple):
    """One line of the summary."""

    name: str
    value: object
    is_good: bool = True


class Part(NamedTuple):
    """How much of a part, for how long, in how many processes."""

    folder: Path
    number: int
    seconds: float
    seed: int
    processes: int


def soak_kills(part: Part, make_jobs: Callable[[Path], list[Job]]) -> list[Row]:
    """Kill and resume, some at the same time, each with its own jobs, folder and seed."""
    write_data(part.folder / "data")
    jobs, begin = make_jobs(part.folder / "data"), time.monotonic()
    random.Random(part.seed).shuffle(jobs)
    all_kills = []
    for index in range(part.processes):
        folder, own = part.folder / str(index), jobs[index :: part.processes]
        folder.mkdir()
        number = -(-part.number // part.processes)
        all_kills.append(Kills(folder, own, 1000 * part.seed + index, number, part.seconds))
    with ThreadPoolExecutor(part.processes) as pool:  # they only wait for processes
        list(pool.map(Kills.run, all_kills))
    counts = sum((kills.counts for kills in all_kills), collections.Counter[str]())
    failures = [failure for kills in all_kills for failure in kills.failures]
    signals = {name: number for name, number in counts.items() if name.startswith("SIG")}
    others = {name: number for name, number in counts.items() if name not in signals}
    slowest = max(kills.slowest_end for kills in all_kills)
    minutes = (time.monotonic() - begin) / 60
    return [
        Row("kills", f"{counts['kills']} of {part.number} in {minutes:.1f} minutes, {part.processes} at a time"),
        Row("... by signal and target", _listing(signals)),
        Row("... and what else was counted", _listing(others)),
        Row("longest time from a signal to the end of all processes, seconds", f"{slowest:.1f}"),
        Row("different bits, hangs, tracebacks and other failures", "\n".join(failures) or "none", not failures),
    ]


def _listing(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in sorted(counts.items()))


def resident_megabytes() -> float:
    """The resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def average_often(method: str, num_averagings: int, seconds: float) -> dict[str, Any]:
    """Average a population many times; returns the memory after a tenth and at the end."""
    config = replace(small_config(), method=method)
    average = replace(config.average, every_steps=1, every_epochs=1e-6, repair=0)
    coupling = {"every_steps": 1} if method in COUPLINGS else {}
    training = build(replace(config, average=average, coupling=coupling, train=replace(config.train, epochs=10**7)))
    for parameter in (parameter for net in training.population for parameter in net.parameters()):
        parameter.grad = torch.ones_like(parameter)  # for rules that look at gradients
    begin, first, count = time.monotonic(), 0.0, 0
    while count < num_averagings and time.monotonic() < begin + seconds:
        training.averager.step()
        count = training.averager.num_averagings
        if not first and (count >= num_averagings / 10 or time.monotonic() > begin + seconds / 10):
            first = resident_megabytes()
    return {"averagings": count, "first": first, "last": resident_megabytes()}


def soak_averagings(part: Part) -> list[Row]:
    """Every method, each in its own process."""
    rows, total, worst = [], 0, 0.0
    methods = [method for method in METHODS if method != "independent"]
    seconds = part.seconds * part.processes / len(methods)
    arguments = [(method, int(part.number * MOST_OF_A_KIND), seconds) for method in methods]
    for method, found in zip(methods, in_processes(average_often, arguments, part.processes), strict=True):
        if isinstance(found, str):
            rows.append(Row(f"averagings of {method}", found, False))
            continue
        total, worst = total + found["averagings"], max(worst, found["last"] / found["first"])
    rows.append(Row(f"averagings by {len(methods)} methods", f"{total} of {part.number}"))
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


def soak_files(part: Part) -> list[Row]:
    """Every kind of file, each in its own process, which must not die."""
    names, rows, total, arguments = list(kinds()), [], 0, []
    for number, kind in enumerate(names):
        place = part.folder / str(number)
        place.mkdir()
        seconds = part.seconds * part.processes / len(names)
        arguments.append((kind, str(place), int(part.number * MOST_OF_A_KIND), seconds, part.seed))
    for kind, found in zip(names, in_processes(read_altered, arguments, part.processes), strict=True):
        if isinstance(found, str):
            rows.append(Row(f"altered: {kind}", found, False))
            continue
        total += found["refused"] + found["accepted"]
        text = f"{found['refused']} refused, {found['accepted']} read; at most {found['slowest']:.2f} s and "
        text += f"{found['extra']:.0f} MB more"
        is_good = found["slowest"] <= MOST_SECONDS and found["extra"] <= MOST_EXTRA_MEGABYTES
        rows.append(Row(f"altered: {kind}", text, is_good))
    return [Row("altered files", f"{total} of {part.number}"), *rows]


Found = dict[str, Any] | str
"""What a process returned, or how it ended."""


def in_processes(
    job: Callable[..., dict[str, Any]], arguments: list[tuple[Any, ...]], processes: int
) -> Iterator[Found]:
    """What a function returns for each of the arguments, some at a time, each in a process of its own."""
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda these: in_process(job, *these), arguments)


def in_process(job: Callable[..., dict[str, Any]], *arguments: Any) -> Found:
    """What a function returns in a process of its own; forked, which saves the time of imports."""
    context: Any = fork_server.context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, job, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        found: Found = receiver.recv()
    except EOFError:
        process.join()
        found = f"the process ended with code {process.exitcode}"
    process.join()
    return found


def _send(sender: Any, job: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # Linux may share processors by session: so it has its own share, as the runs that are killed have
    torch.set_num_threads(1)
    try:
        sender.send(job(*arguments))
    except BaseException:
        sender.send(traceback.format_exc()[-2000:])


PARTS: dict[str, Callable[[Part], list[Row]]] = {
    "averagings": soak_averagings,
    "files": soak_files,
    "kills": partial(soak_kills, make_jobs=run_jobs),
    "adapters": partial(soak_kills, make_jobs=adapter_jobs_),
}


def main() -> None:
    """Run the soak test and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; all numbers are proportional to it")
    parser.add_argument("--only", choices=PARTS, help="one part, for all of the time, and as much of it as in an hour")
    parser.add_argument("--seed", type=int, default=1, help="seed of kills and alterations")
    parser.add_argument("--processes", type=int, default=2, help="how many kill, average or read at the same time")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = list(PARTS) if chosen.only is None else [chosen.only]
    fork_server.MODULES += ["alterations", "soak_kills", *(LIBRARIES if "adapters" in names else [])]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="papa-soak-") as temporary:
        for name in names:
            folder = Path(temporary) / name
            folder.mkdir()
            scale = chosen.minutes / 60 if chosen.only is None else 1.0
            share = SHARES[name] if chosen.only is None else 1.0
            number, seconds = int(NUMBERS[name] * scale), share * chosen.minutes * 60
            found = PARTS[name](Part(folder, number, seconds, chosen.seed, chosen.processes))
            show(found)
            rows += found
    today, machine = time.strftime("%Y-%m-%d", time.gmtime()), f"{os.cpu_count()} processors, {platform.platform()}"
    show([Row("date, machine", f"{today}, {machine}, torch {torch.__version__}")])
    sys.exit(0 if all(row.is_good for row in rows) else 1)


def show(rows: list[Row]) -> None:
    """Print lines of the summary."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        sys.stdout.write(f"{row.name:{width}}  {row.value}{'' if row.is_good else '   FAILED'}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
