"""Executing several runs, one after the other or in parallel."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from papa.core.group import Group
from papa.distributed.start import start_workers
from papa.distributed.torchrun import rank_of_torchrun
from papa.errors import ConfigError, PapaError, RunError, StoppedError
from papa.lab.launch import RunSpec, execute
from papa.lab.signals import StopFlag, new_flag, watching_signals
from papa.packages import missing_package

Outcome: TypeAlias = "dict[str, Any] | PapaError"
"""The result of a run, or the error that ended it."""

CONTINUE = "the same command, without --overwrite"


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of several runs, by their directories."""

    results: Mapping[Path, dict[str, Any]]
    """The contents of `result.json` of each run that finished."""
    errors: Mapping[Path, PapaError]
    """The error of each run that failed."""

    def check(self) -> None:
        """Raise a `RunError` that names the failed runs, if any; when all failed for the same reason, raise that."""
        if not self.errors:
            return
        paths_by_reason: dict[str, list[str]] = {}
        for path, error in self.errors.items():
            paths_by_reason.setdefault(str(error), []).append(str(path))
        if not self.results and len(paths_by_reason) == 1:
            raise next(iter(self.errors.values()))
        listing = "\n".join(f"  {', '.join(paths)}: {reason}" for reason, paths in paths_by_reason.items())
        raise RunError(
            f"{len(self.errors)} of {len(self.results) + len(self.errors)} runs failed; the others are complete. "
            f"Fix the causes, then run the same command without --overwrite to run what is missing:\n{listing}"
        )


def execute_all(specs: Sequence[RunSpec], *, num_parallel: int = 1) -> Outcomes:
    """Execute several runs, one after the other or in parallel; specs with the same directory are one run.

    A run that fails does not stop the others. On SIGINT or SIGTERM the active runs save, no other run starts, and
    `StoppedError` is raised; with `resume=True` in the specs, a second call continues.
    """
    if num_parallel > 1 and rank_of_torchrun() is not None:
        raise ConfigError(f"--parallel is {num_parallel}, but torchrun sets the number of processes: remove --parallel")
    unique: dict[Path, RunSpec] = {}
    for spec in specs:
        spec.checkpoints.check()
        unique.setdefault(spec.path, spec)
    runs = list(unique.values())
    is_parallel = num_parallel > 1 and len(runs) > 1
    stop = new_flag(is_parallel=is_parallel)
    with watching_signals(stop, CONTINUE):
        if not is_parallel:
            outcomes = _execute_each(runs, range(len(runs)), stop)
        else:
            num_workers = min(num_parallel, len(runs))
            num_taken = multiprocessing.get_context("spawn").Value("i", 0)
            outcomes = start_workers(_execute_next, num_workers, num_workers, runs, num_taken, stop)
    if len(outcomes) < len(runs) or any(isinstance(outcome, StoppedError) for outcome in outcomes.values()):
        num_done = sum(isinstance(outcome, dict) for outcome in outcomes.values())
        raise StoppedError(f"stopped and saved with {num_done} of {len(runs)} runs done; continue with {CONTINUE}")
    by_path = [(runs[index].path, outcome) for index, outcome in sorted(outcomes.items())]
    return Outcomes(
        results={path: outcome for path, outcome in by_path if isinstance(outcome, dict)},
        errors={path: outcome for path, outcome in by_path if not isinstance(outcome, dict)},
    )


def _execute_next(group: Group, runs: Sequence[RunSpec], num_taken: Any, stop: StopFlag) -> dict[int, Outcome]:
    """The job of each parallel process: execute the next run that no process has taken, until none is left."""

    def indices() -> Iterator[int]:
        while True:
            with num_taken.get_lock():
                index = num_taken.value
                num_taken.value += 1
            if index >= len(runs):
                return
            yield index

    outcomes = _execute_each([replace(spec, workers=1) for spec in runs], indices(), stop)
    return {index: outcome for part in group.all_gather([outcomes]) for index, outcome in part.items()}


def _execute_each(runs: Sequence[RunSpec], indices: Iterable[int], stop: StopFlag) -> dict[int, Outcome]:
    """The outcome of each run that was started, by its index; no run starts after a signal."""
    outcomes: dict[int, Outcome] = {}
    for index in indices:
        if stop.value:
            break
        try:
            outcomes[index] = execute(runs[index], stop=stop)
        except Exception as error:
            if rank_of_torchrun() is not None:
                raise  # the other processes may not have failed, and wait for this one
            outcomes[index] = _without_traceback(error)
        gc.collect()  # a training has reference cycles: its data would stay in memory during the next run
    return outcomes


def _without_traceback(error: Exception) -> PapaError:
    """The same error without its traceback, which keeps everything the run held in memory."""
    if isinstance(error, PapaError):
        return type(error)(*error.args)
    return missing_package(error) or RunError(traceback.format_exc())
