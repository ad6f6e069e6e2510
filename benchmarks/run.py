"""Run every benchmark several times and write one table: machine, versions, ratios with their targets and range.

A script that fails or misses a target is marked, and the others still run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from _bench import Result, positive
from papa import __version__
from papa.errors import did_you_mean
from papa.storage import write_atomically

FOLDER = Path(__file__).parent
PROSE = "where_time_goes.md"
"""Text written by hand, which follows the table."""
PACKAGES = ("torchvision", "timm")
LEADING = (
    ("train", "papa against the script", "training four ResNet-20 on two cores, against the script one would write"),
    ("text", "papa against the loop", "training transformers, against a plain loop"),
    ("distributed", "training, 2 against 1", "training on two processes, against one"),
    (
        "push",
        "Averager.step, measured / torch foreach",
        "`Averager.step()` of five ResNet-18, against `torch._foreach`",
    ),
    (
        "averager_step",
        "4 networks of 100,000 numbers: Averager.step, measured",
        "... of four networks of 100,000 numbers",
    ),
    ("couplings", "SparseAverage, 0.5%", "averaging 0.5% of the weights, against a push of all"),
    ("checkpoint", "pause of a checkpoint", "the pause of a checkpoint, against a copy of weights and momentum"),
    ("soup_files", "papa.soup_files", "the soup of files, against moving their bytes"),
    ("stacked", "logistic regression, batch size 1: stacked", "all members in one call, tiny networks, against a loop"),
    ("start", "papa --help", "`papa --help`, against `import torch`"),
)
"""What a user feels: the script and the name of its line, and how the page's first table calls it."""
QUIET_LOAD = 0.5
"""The load average up to which a machine counts as quiet before the first script."""
QUIET_SHARE = 0.05
"""The share of all processors that other processes may use during the measurement."""


@dataclass
class Runs:
    """The output of all repetitions of one script."""

    command: str
    script: str = ""
    """The name of the script."""
    results: list[list[Result]] = field(default_factory=list)
    """The results of each successful repetition, in the order of the script."""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One line of a benchmark over all repetitions."""

    middle: Result
    """The medians of all numbers."""
    spread: tuple[float, float] | None
    """The smallest and largest ratio, or amount of memory."""
    num_seen: int
    """The number of repetitions with this line."""
    num_ok: int
    """The number of repetitions that met the target."""

    @property
    def verdict(self) -> str:
        """Whether the median meets the target, and how many repetitions do."""
        if self.middle.target is None:
            return ""
        if not self.middle.ok:
            return f"**MISSED** ({self.num_ok} of {self.num_seen} ok)"
        return "ok" if self.num_ok == self.num_seen else f"ok ({self.num_ok} of {self.num_seen})"


class Usage:
    """The load of other processes during the measurement; unknown where the system does not report it."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self.start, self.busy, self.ours = time.monotonic(), _busy_seconds(), _our_seconds()

    def others(self) -> float | None:
        """The share of all processors that other processes used since the start."""
        busy = _busy_seconds()
        if busy is None or self.busy is None:
            return None
        available = (time.monotonic() - self.start) * (os.cpu_count() or 1)
        return max(0.0, busy - self.busy - (_our_seconds() - self.ours)) / available

    def warning(self) -> str | None:
        """A warning if the machine was not quiet."""
        others, found = self.others(), []
        if self.load > QUIET_LOAD:
            found.append(f"the load average was {self.load:.2f} before the first script")
        if others is not None and others > QUIET_SHARE:
            found.append(f"other processes used {others:.0%} of the processors")
        return f"The machine was not quiet: {', and '.join(found)}. Times and ratios may be wrong." if found else None


def _busy_seconds() -> float | None:
    """The busy time of all processors together, on Linux."""
    try:
        numbers = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = numbers[:8]
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def _our_seconds() -> float:
    """The processor time of this process and its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_script(script: Path, runs: Runs, minutes: float) -> None:
    """Run a script once, and record its results or its failure."""
    command = [sys.executable, str(script), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        runs.failures.append(f"not done after {minutes:g} minutes")
        return
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1:] or ["no message"]
        runs.failures.append(f"exit status {done.returncode}: {last_line[0]}")
        return
    try:
        results = [Result.from_json(line) for line in done.stdout.splitlines()]
    except ValueError as error:
        runs.failures.append(f"a line is not a result: {error}")
        return
    names = [result.name for result in results]
    if len(set(names)) < len(names):
        runs.failures.append(f"two results with the name {next(name for name in names if names.count(name) > 1)}")
    elif results:
        runs.results.append(results)
    else:
        runs.failures.append("no results")


def summarize(repetitions: Sequence[Sequence[Result]]) -> list[Row]:
    """The lines of all repetitions by their names, in the order of their first occurrence."""
    by_name: dict[str, list[Result]] = {}
    for results in repetitions:
        for result in results:
            by_name.setdefault(result.name, []).append(result)
    return [_row(results) for results in by_name.values()]


def _row(results: Sequence[Result]) -> Row:
    columns = {
        name: [value for result in results if (value := getattr(result, name)) is not None]
        for name in ("seconds", "ratio", "megabytes")
    }
    middle = replace(results[-1], **{name: median(values) if values else None for name, values in columns.items()})
    measured = columns["megabytes"] or columns["ratio"]
    spread = (min(measured), max(measured)) if measured else None
    return Row(middle, spread, num_seen=len(results), num_ok=sum(result.ok for result in results))


def render(all_runs: Sequence[Runs], *, command: str, repeats: int, usage: Usage, prose: str) -> str:
    """The page as Markdown."""
    warning = usage.warning()
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Made by",
            "",
            "```console",
            command,
            "```",
            "",
            "which runs each script in turn, several times. A ratio is a time divided by that of a baseline of the",
            "same run, or a share of the whole; lower is better. Times and ratios are medians over the repetitions,",
            "with the smallest and largest ratio in brackets.",
            "",
            *(f"- {name}: {value}" for name, value in {**machine(), **versions()}.items()),
            f"- repetitions: {repeats}",
            "",
            *([f"> **Warning.** {warning}", ""] if warning else []),
            *leading_lines(all_runs),
            "| what | time | ratio or memory | target | |",
            "|---|--:|--:|--:|---|",
            *(line for runs in all_runs for line in table_lines(runs)),
            *(["", prose.strip()] if prose else []),
            "",
        ]
    )


def leading_lines(all_runs: Sequence[Runs]) -> list[str]:
    """The lines that a user cares about, as far as their scripts were run, as a table of their own."""
    found = {(runs.script, row.middle.name): row for runs in all_runs for row in summarize(runs.results)}
    lines = []
    for script, name, words in LEADING:
        if (script, name) in found:
            row = found[script, name]
            target = "" if row.middle.target is None else f"<= {row.middle.target:.3g}"
            lines.append(f"| {words} | {_measured(row.middle.ratio, row.spread, '')} | {target} | {row.verdict} |")
    return ["| what a user feels | ratio | target | |", "|---|--:|--:|---|", *lines, ""] if lines else []


def table_lines(runs: Runs) -> list[str]:
    """The lines of one script: its command, its failures, its numbers."""
    lines = [f"| **`{runs.command}`** | | | | |"]
    lines += [f"| **FAILED**: {_cell(failure)} | | | | |" for failure in runs.failures]
    for row in summarize(runs.results):
        middle, is_memory = row.middle, row.middle.megabytes is not None
        seen = "" if row.num_seen == len(runs.results) else f" ({row.num_seen} of {len(runs.results)} repetitions)"
        note = "" if middle.note is None else f": {middle.note}"
        cells = [
            _cell(f"{middle.name}{note}{seen}"),
            "" if middle.seconds is None else _time(middle.seconds),
            _measured(middle.megabytes if is_memory else middle.ratio, row.spread, " MB" if is_memory else ""),
            "" if middle.target is None else f"<= {middle.target:.3g}{' MB' if is_memory else ''}",
            row.verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.1f} ms"


def _measured(middle: float | None, spread: tuple[float, float] | None, unit: str) -> str:
    if middle is None or spread is None:
        return ""
    return f"{middle:.3f} [{spread[0]:.3f}, {spread[1]:.3f}]{unit}"


def machine() -> dict[str, str]:
    """The hardware and system, without anything that identifies the owner."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The versions of everything that affects the numbers."""
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "papa": __version__}


def chosen_scripts(folder: Path, only: str | None) -> list[Path]:
    """All scripts of a folder, or those named in `only`; raises `ValueError` for an unknown name."""
    scripts = {path.stem: path for path in sorted(folder.glob("[a-z]*.py")) if path.name != Path(__file__).name}
    if not scripts:
        raise ValueError(f"--folder is {folder}, which contains no benchmarks")
    names = list(scripts) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in scripts:
            raise ValueError(f"there is no benchmark {name!r}: {did_you_mean(name, scripts)}")
    return [scripts[name] for name in names]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks and return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="scripts to run, by name, separated by commas: push,train")
    parser.add_argument("--repeats", type=positive, default=3, help="number of repetitions of each script")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of each repetition")
    parser.add_argument("--out", type=Path, help="the file to write; standard output by default")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the scripts")
    options = parser.parse_args(arguments)
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        parser.error(f"--out is {options.out}, expected a file in an existing directory")
    try:
        scripts = chosen_scripts(options.folder, options.only)
    except ValueError as error:
        parser.error(str(error))
    usage = Usage()
    all_runs = {script: Runs(f"python {options.folder.name}/{script.name} --json", script.stem) for script in scripts}
    is_complete = True
    try:
        for repeat in range(options.repeats):  # all scripts once, then again: a busy hour then affects all of them
            for script, runs in all_runs.items():
                print(f"papa: {script.name}, {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
                num_failures = len(runs.failures)
                run_script(script, runs, options.minutes)
                for failure in runs.failures[num_failures:]:
                    print(f"papa: {script.name}: {failure}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        is_complete = False
        for runs in all_runs.values():
            runs.failures += [] if len(runs.results) == options.repeats else ["interrupted"]
    prose = options.folder / PROSE
    page = render(
        list(all_runs.values()),
        command=shlex.join(["benchmarks/run", *arguments]),
        repeats=options.repeats,
        usage=usage,
        prose=prose.read_text() if prose.exists() and options.only is None else "",
    )
    if options.out is None:
        print(page)
    else:
        write_atomically(options.out, page)
    if not is_complete:
        return 130
    rows = [row for runs in all_runs.values() for row in summarize(runs.results)]
    return 0 if all(row.middle.ok for row in rows) and not any(runs.failures for runs in all_runs.values()) else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored in background jobs by default
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
