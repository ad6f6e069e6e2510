"""Reading run directories for reports, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papa.errors import RunError
from papa.lab.config import METHODS
from papa.lab.report.fields import number
from papa.lab.runs import RunDirectory, fold_merges
from papa.storage import read_json


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    path: Path
    result: dict[str, Any]
    """The content of `result.json`; for an unfinished run only recipe, method, seed and config."""
    events: list[dict[str, Any]]
    """The events of `metrics.jsonl`."""
    is_finished: bool


def read_run(path: Path) -> Run:
    """Read the run in a directory; a `RunError` if there is none, or if its files are not those of papa."""
    run = RunDirectory(path)
    config = _read_object(run.config) if run.config.exists() else {}
    events = read_events(run.metrics)
    if run.result.exists():
        return Run(path, _read_object(run.result), events, True)
    if not run.config.exists():
        raise RunError(
            f"{path} is not a run of papa: it has neither config.json nor result.json. "
            "Give the directory that `papa run` or `papa compare` wrote"
        )
    names = {key: config.get(key) for key in ("recipe", "method", "seed")}
    return Run(path, {**names, "config": config}, events, False)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except RecursionError as error:
        raise RunError(f"{path} is nested too deeply to be a file of papa") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} contains {type(value).__name__}, expected an object as papa writes it")
    return value


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a `metrics.jsonl`, one for each merge; empty if there is no file."""
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    return fold_merges(parse_events(lines))


def parse_events(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The events on some lines, without lines that are no JSON object, such as one that was cut short."""
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def is_run(path: Path) -> bool:
    """Whether a directory is the directory of a single run."""
    run = RunDirectory(path)
    return run.config.exists() or run.result.exists()


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in some directories: each is a run, or contains runs as `papa compare` writes them."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise RunError(f"there is no directory {path}: give one that `papa run` or `papa compare` wrote")
        inside = [path] if is_run(path) else [child for child in sorted(path.iterdir()) if is_run(child)]
        if not inside:
            raise RunError(
                f"neither {path} nor a directory in it is a run of papa: config.json and result.json are missing"
            )
        found += inside
    runs = [read_run(path) for path in dict.fromkeys(path.resolve() for path in found)]
    return sorted(runs, key=_sort_key)


def _sort_key(run: Run) -> tuple[str, int, float]:
    """Methods in papa's order, then seeds."""
    method, seed = run.result.get("method"), number(run.result.get("seed"))
    known = list(METHODS)
    return (
        str(run.result.get("recipe")),
        known.index(method) if method in known else len(known),
        0.0 if seed is None else seed,
    )
