"""Listing runs: which there are, their state, their scores and when they last wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from papa.errors import RunError
from papa.lab.report.table import KEYS, scores_of
from papa.lab.runs import RunDirectory, is_run

MAX_DEPTH = 5
"""How deep runs are searched for in a directory."""


@dataclass(frozen=True)
class ListedRun:
    """A run in a list."""

    path: Path
    result: Mapping[str, Any]
    """The content of `result.json`; of an unfinished run recipe, method, seed and config."""
    scores: Mapping[str, float | None]
    """On test data, or else on validation data; of an unfinished run on validation data, after its last epoch."""
    state: Literal["finished", "running", "stopped"]
    epoch: int
    """Epochs that are done."""
    num_epochs: int
    time: float
    """When it last wrote, in seconds since 1970."""

    @property
    def progress(self) -> str:
        """The state, with the epoch of an unfinished run."""
        return self.state if self.state == "finished" else f"{self.state}, epoch {self.epoch}/{self.num_epochs}"


def list_runs(directory: Path) -> tuple[list[ListedRun], list[RunError]]:
    """The runs in a directory and below, the newest first, and an error for each that cannot be read."""
    runs, errors = [], []
    for path in find_runs(directory):
        try:
            runs.append(_listed(path))
        except RunError as error:
            errors.append(error)
    return sorted(runs, key=lambda run: (-run.time, str(run.path))), errors


def find_runs(directory: Path, depth: int = 0) -> Iterator[Path]:
    """The run directories in a directory and below; links are not followed."""
    if is_run(directory):
        yield directory
        return
    if depth == MAX_DEPTH:
        return
    try:
        inside = sorted(entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
    except OSError:  # a directory that this user may not read
        return
    for path in inside:
        yield from find_runs(Path(path), depth + 1)


def _listed(path: Path) -> ListedRun:
    run = RunDirectory(path)
    is_stopped = run.is_interrupted
    result = run.read_result_so_far()
    num_epochs = (result["config"].get("train") or {}).get("epochs") or 0
    if run.is_finished:
        scores = {key: scores_of(result).get(key) for key in KEYS}
        return ListedRun(path, result, scores, "finished", num_epochs, num_epochs, run.result.stat().st_mtime)
    last: dict[str, Any] = {}
    for event in run.read_metrics():
        last = event if event["event"] == "epoch" else last
    members = [score for score in last.get("validation") or () if score is not None]
    scores = dict.fromkeys(KEYS) | {
        "mean": sum(members) / len(members) if members else None,
        "ensemble": last.get("validation_ensemble"),
        "average_soup": last.get("validation_average_soup"),
    }
    written = run.metrics if run.metrics.exists() else run.config
    state: Literal["stopped", "running"] = "stopped" if is_stopped else "running"
    return ListedRun(path, result, scores, state, int(last.get("epoch") or 0), num_epochs, written.stat().st_mtime)
