"""Executing several configs, one after the other or side by side."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from papa.errors import ConfigError, PapaError, RunError, StoppedError
from papa.group import Group, rank_of_torchrun, start_workers
from papa.lab.config import Config
from papa.lab.launch import CallbackFactory, Saving, execute
from papa.lab.signals import watching_signals


@dataclass(frozen=True)
class Outcomes:
    """What came of several runs, by their directories."""

    results: Mapping[Path, dict[str, Any]]
    """What the `result.json` of each that came to its end holds."""
    errors: Mapping[Path, PapaError]
    """Why the others did not."""

    def check(self) -> None:
        """Raise a `RunError` that names the runs that failed, if any did; where all failed for one reason, that one."""
        paths_by_reason: dict[str, list[str]] = {}
        for path, error in self.errors.items():
            paths_by_reason.setdefault(str(error), []).append(str(path))
        if not self.errors:
            return
        if not self.results and len(paths_by_reason) == 1:
            raise next(iter(self.errors.values()))
        listing = "\n".join(f"  {', '.join(paths)}: {reason}" for reason, paths in paths_by_reason.items())
        raise RunError(
            f"{len(self.errors)} of {len(self.results) + len(self.errors)} runs failed; the others are done and kept. "
            f"When the causes are cured, the same command without --overwrite runs what is missing:\n{listing}"
        )


def execute_all(
    jobs: Sequence[tuple[Config, Path]],
    *,
    num_parallel: int = 1,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    saving: Saving = Saving(),  # noqa: B008
    make_callback: Callable[[Config, Path], CallbackFactory] | None = None,
) -> Outcomes:
    """Run several configs, one after the other or side by side; those of one directory are one run.

    A run that fails does not keep the others from running. On SIGINT or SIGTERM the runs under way save, no other is
    begun, and `StoppedError` is raised; with `resume` all can be continued.

    Args:
        jobs: what to run, and the directory of each.
        num_parallel: how many processes of one thread run side by side; each takes the next config when it is done
            with one. 1 for this process alone.
        workers: as for `execute`; None where runs are side by side.
        overwrite: as for `execute`.
        resume: as for `execute`.
        saving: as for `execute`.
        make_callback: makes what looks on, from a config and its directory; as for `execute`.
    """
    _check_parallel(num_parallel, workers)
    saving.check()
    for config, _ in jobs:
        config.check()
    configs = {path: config for config, path in jobs}
    runs = [
        (config, path, None if make_callback is None else make_callback(config, path))
        for path, config in configs.items()
    ]
    context = multiprocessing.get_context("spawn")
    stop = context.RawValue("i", 0)
    execute_one = partial(execute, overwrite=overwrite, resume=resume, saving=saving, stop=stop)
    with watching_signals(stop):
        if num_parallel == 1 or len(runs) < 2:
            found = _outcomes(execute_one, runs, range(len(runs)), stop, workers)
        else:
            num_workers = min(num_parallel, len(runs))
            num_taken = context.Value("i", 0)
            found = start_workers(_take_runs, num_workers, num_workers, execute_one, runs, num_taken, stop)
    if len(found) < len(runs) or any(isinstance(outcome, StoppedError) for outcome in found.values()):
        num_done = sum(isinstance(outcome, dict) for outcome in found.values())
        raise StoppedError(
            f"stopped with {num_done} of {len(runs)} runs done, and saved; the same command without --overwrite goes on"
        )
    by_path = [(runs[number][1], outcome) for number, outcome in sorted(found.items())]
    return Outcomes(
        results={path: outcome for path, outcome in by_path if isinstance(outcome, dict)},
        errors={path: outcome for path, outcome in by_path if not isinstance(outcome, dict)},
    )


def _check_parallel(num_parallel: int, workers: int | None) -> None:
    if num_parallel < 1:
        raise ConfigError(f"--parallel is {num_parallel}, expected at least 1")
    if num_parallel == 1:
        return
    if workers is not None:
        raise ConfigError("there are --workers and --parallel, expected one of them: runs side by side have one worker")
    if rank_of_torchrun() is not None:
        raise ConfigError(f"--parallel is {num_parallel}, but torchrun says how many processes there are: leave it out")


def _take_runs(
    group: Group,
    execute_one: Callable[..., dict[str, Any]],
    runs: Sequence[tuple[Config, Path, CallbackFactory | None]],
    num_taken: Any,
    stop: Any,
) -> dict[int, dict[str, Any] | PapaError]:
    """What each of the processes side by side does: take a run that nobody took, until there is none."""

    def numbers() -> Iterator[int]:
        while True:
            with num_taken.get_lock():
                number = num_taken.value
                num_taken.value += 1
            if number >= len(runs):
                return
            yield number

    found = _outcomes(execute_one, runs, numbers(), stop, 1)
    return {number: outcome for part in group.all_gather([found]) for number, outcome in part.items()}


def _outcomes(
    execute_one: Callable[..., dict[str, Any]],
    runs: Sequence[tuple[Config, Path, CallbackFactory | None]],
    numbers: Iterable[int],
    stop: Any,
    workers: int | None,
) -> dict[int, dict[str, Any] | PapaError]:
    """The result or the error of each run that was begun, by its number; none is begun when it is time to stop."""
    found: dict[int, dict[str, Any] | PapaError] = {}
    for number in numbers:
        if stop.value:
            break
        config, path, make_callback = runs[number]
        try:
            found[number] = execute_one(config, path, workers=workers, make_callback=make_callback)
        except Exception as error:
            if rank_of_torchrun() is not None:
                raise  # the other processes may not have failed, and wait for this one
            told = error if isinstance(error, PapaError) else RunError(traceback.format_exc())
            found[number] = type(told)(*told.args)  # without the traceback, which refers to all that the run held
        gc.collect()  # a training refers to itself: its data would stay in memory while others run
    return found
