"""Shared by all benchmarks: alternating contenders, one table, JSON lines, a check of the targets."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of a benchmark: a time with its ratio to a baseline, or an amount of memory."""

    name: str
    seconds: float | None = None
    """The best time of all rounds; None if no time was measured."""
    ratio: float | None = None
    """The time divided by that of the baseline; lower is better."""
    megabytes: float | None = None
    """Memory, if memory was measured."""
    target: float | None = None
    """The largest allowed ratio, or amount of memory if that was measured; None without a target."""
    note: str | None = None
    """An optional remark; unlike the name it may differ from run to run."""

    @property
    def ok(self) -> bool:
        """Whether the target was met; true without a target."""
        measured = self.ratio if self.megabytes is None else self.megabytes
        return self.target is None or (measured is not None and measured <= self.target)

    def as_json(self) -> str:
        """The result as one line of JSON."""
        values: dict[str, object] = {"name": self.name, "seconds": self.seconds, "ratio": self.ratio}
        if self.megabytes is not None:
            values["megabytes"] = self.megabytes
        if self.note is not None:
            values["note"] = self.note
        return json.dumps({**values, "target": self.target, "ok": self.ok})

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The inverse of `as_json`; raises `ValueError` for any other line.

        Example:
            >>> Result.from_json(Result(name="push", ratio=1.25, target=1.4).as_json()).ok
            True
        """
        values = json.loads(line, parse_constant=_refuse)
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            raise ValueError(f"expected an object with a name, found {line!r}")
        numbers = {name: values.get(name) for name in ("seconds", "ratio", "megabytes", "target")}
        for name, value in numbers.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} of {values['name']!r} is {value!r}, expected a number or null")
        return cls(name=values["name"], note=values.get("note"), **numbers)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def best_times(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The best time of each contender over some rounds, in seconds of the clock.

    All contenders run once per round, one after the other, so that other load on the machine affects all of them; the
    best round is the least disturbed one. The first round is a warm-up and not counted.
    """
    best = dict.fromkeys(contenders, float("inf"))
    for counted in [False, *[True] * rounds]:
        for name, run in contenders.items():
            gc.collect()
            start = clock()
            run()
            elapsed = clock() - start
            if counted:
                best[name] = min(best[name], elapsed)
    return best


class Parts:
    """Seconds by the name of a part. Time in a part that another part calls counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function so that its time is added to a part."""

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            start, counted = time.perf_counter(), sum(self.seconds.values())
            try:
                return function(*args, **kwargs)
            finally:
                within = sum(self.seconds.values()) - counted
                elapsed = time.perf_counter() - start - within
                self.seconds[part] = self.seconds.get(part, 0.0) + elapsed

        return wrapper


def peak_extra_megabytes(run: Callable[[], object], *, maps_files: bool = False) -> float:
    """The peak memory use during `run` above that before it, in MB (10^6 bytes).

    The larger of two measurements: what torch allocated, and on Linux the resident memory of the process, which
    includes a fragmented heap.

    Args:
        run: what to measure.
        maps_files: do not count what torch allocated, since files that are mapped into memory would count as a whole.
    """
    return max(0 if maps_files else _peak_allocated_bytes(run), _peak_resident_bytes(run)) / 1e6


def _peak_allocated_bytes(run: Callable[[], object]) -> int:
    """The peak growth of torch's CPU allocator."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs every start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    allocations = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = peak = 0
    for _, num_bytes in allocations:
        held += num_bytes
        peak = max(peak, held)
    return peak


def _peak_resident_bytes(run: Callable[[], object]) -> int:
    """The peak growth of the process; 0 where the system does not report it."""
    status, clear_refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not (status.exists() and clear_refs.exists()):
        return 0

    def kilobytes(field: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(field)).split()[1])

    gc.collect()
    with contextlib.suppress(AttributeError):  # only in glibc: return the free memory of earlier contenders
        ctypes.CDLL(None).malloc_trim(0)
    try:
        clear_refs.write_text("5")  # resets the peak
    except OSError:
        return 0
    before = kilobytes("VmRSS")
    run()
    return max(0, kilobytes("VmHWM") - before) * 1024


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    options.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
    options.add_argument("--rounds", type=positive, default=9, help="number of rounds; the best counts")
    return options


def finish(results: Sequence[Result], options: argparse.Namespace, *, title: str) -> None:
    """Print the results as the options say, and exit with status 1 if a checked target was missed."""
    if options.json:
        for result in results:
            print(result.as_json())
    else:
        print(f"{title} (torch {torch.__version__}, {torch.get_num_threads()} thread)\n")
        print(table(results))
    if options.check and not all(result.ok for result in results):
        sys.exit(1)


def table(results: Sequence[Result]) -> str:
    """The results in aligned columns."""
    rows = [("", "time", "ratio", "memory", "target", "")]
    for result in results:
        rows.append(
            (
                result.name if result.note is None else f"{result.name}: {result.note}",
                "" if result.seconds is None else f"{1e3 * result.seconds:.1f} ms",
                "" if result.ratio is None else f"{result.ratio:.3f}",
                "" if result.megabytes is None else f"{result.megabytes:.2f} MB",
                "" if result.target is None else f"<= {result.target:g}",
                "" if result.target is None else ("ok" if result.ok else "MISSED"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)
