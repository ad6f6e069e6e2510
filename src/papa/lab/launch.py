"""Executing a run: choose the processes, train, make soups, write the run directory."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from papa._version import __version__
from papa.core import kernels
from papa.core.group import Group, LocalGroup
from papa.distributed.start import start_workers
from papa.distributed.torchrun import Torchrun, rank_of_torchrun
from papa.errors import ConfigError, PapaError, RunError
from papa.lab.config import Config, flat, idle_options, option_of
from papa.lab.data.files import num_cores
from papa.lab.domains import load_domain, policies_for
from papa.lab.loading import load_ensemble
from papa.lab.outcome import finalize_run
from papa.lab.recipes import paper_details, paper_scores, paper_soups
from papa.lab.recipes.build import build, callbacks_for
from papa.lab.recorder import Recorder
from papa.lab.report.page import run_page
from papa.lab.result import as_stored, fold_merges
from papa.lab.runs import RunDirectory, is_metrics_state
from papa.lab.signals import StopFlag, stop_flag
from papa.lab.tasks.picture import prediction_picture
from papa.packages import require
from papa.process import find_device
from papa.storage import DamagedError, read_object, write_atomically, write_json
from papa.training import Callback, CheckpointOptions, Training
from papa.training.checkpoints import CheckpointWriter
from papa.training.saving import resume_

SMALL_DATA_SETS = ("digits", "optdigits")
FEW_EXAMPLES = 20_000
"""With fewer training examples seen by all members together, starting a second process costs more than it saves."""

CallbackFactory: TypeAlias = Callable[[], AbstractContextManager[Callback]]
"""Makes a callback for the leading process, such as a progress display."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run to execute: what to train, where its files go, and how."""

    config: Config
    path: Path
    """The run directory."""
    workers: int | None = None
    """The number of processes that hold the members; None to choose. Results do not depend on it. Under torchrun its
    processes hold them, and this must be None."""
    overwrite: bool = False
    """Replace a run that is there."""
    resume: bool = False
    """Continue a run that is there; a finished run is not executed again."""
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    make_callback: CallbackFactory | None = None
    """Makes a callback for the leading process; must be picklable."""
    callbacks: Sequence[Callback] = ()
    """Further callbacks for the leading process; must be picklable."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.path)

    def check(self) -> None:
        """Raise a `ConfigError` if the run cannot be executed."""
        require("jinja2", "matplotlib")  # for the report at its end
        self.checkpoints.check()
        members = self.config.members
        if self.workers is not None and not 1 <= self.workers <= members:
            raise ConfigError(
                f"--workers is {self.workers}, expected 1 to {members}: a worker holds at least one of the members"
            )


def execute(spec: RunSpec, *, stop: StopFlag | None = None) -> dict[str, Any]:
    """Execute a run and return the content of its `result.json`.

    On SIGINT or SIGTERM the run finishes its step, saves and raises `StoppedError`; a second signal ends it at once,
    and so does the first one before and after training, when everything is saved.

    A caller that handles signals gives the flag that it sets as `stop`.
    """
    spec = replace(spec, config=spec.config.settled)
    if rank_of_torchrun() is not None:
        return _execute_under_torchrun(spec, stop)
    spec.check()
    if spec.resume and spec.directory.is_finished:
        return _finished_result(spec)
    run = spec.directory
    with run.lock():
        spec = replace(spec, resume=spec.resume and run.holds_run)
        if not spec.resume:
            run.check_free(overwrite=spec.overwrite)  # before data is read, which may take long
        num_workers = useful_workers(spec.config) if spec.workers is None else spec.workers
        with run.reserved(spec.config.to_json()), stop_flag(stop, f"papa resume {spec.path}") as flag:
            if num_workers == 1:
                return run_in_group(LocalGroup(), spec, flag)
            result: dict[str, Any] = start_workers(run_in_group, num_workers, spec.config.members, spec, flag)
            return result


def _finished_result(spec: RunSpec) -> dict[str, Any]:
    _check_same(spec.config, Config.from_json(spec.directory.read_config()), spec.path)
    return spec.directory.read_result()


def _execute_under_torchrun(spec: RunSpec, stop: StopFlag | None) -> dict[str, Any]:
    if spec.workers is not None:
        raise ConfigError(f"--workers is {spec.workers}, but torchrun sets the number of processes: leave it out")
    spec.check()
    processes, run = Torchrun(), spec.directory
    group = processes.group(spec.config.members, spec.config.device)
    facts = {**dict(flat(spec.config.to_json())), "out": spec.path, "papa": __version__, "torch": torch.__version__}
    facts |= {"overwrite": spec.overwrite, "resume": spec.resume}
    group.check_same({name: str(fact) for name, fact in facts.items()}, cure="start all with the same options")
    _check_shared(spec.path, group)
    # torchrun may restart all processes with the original options: a run that was started is then continued.
    is_restart = run.holds_run and run.torchrun.exists() and processes.is_restart_of(read_object(run.torchrun))
    if is_restart:
        spec = replace(spec, overwrite=False, resume=True)
    is_finished = run.is_finished
    spec = replace(spec, resume=spec.resume and run.holds_run)
    if not spec.resume:
        run.check_free(overwrite=spec.overwrite)  # all see the same directory, so all raise
    group.barrier()  # nobody writes before everybody has looked
    if spec.resume and is_finished:
        return _finished_result(spec)
    with contextlib.ExitStack() as stack:
        problem = ""
        if group.is_leader:  # the others write nothing but their members, into a directory that it has made
            try:
                stack.enter_context(run.lock())
                stack.enter_context(run.reserved(spec.config.to_json(), torchrun=processes.names))
            except RunError as error:
                problem = str(error)
        _raise_together(group, problem)
        flag = stack.enter_context(stop_flag(stop, f"papa resume {spec.path}"))
        return run_in_group(group, spec, flag, on_begin=partial(write_json, run.torchrun, processes.names))


def _check_shared(path: Path, group: Group) -> None:
    """Raise unless all processes see the same file system."""
    mark = path.absolute().parent / f".{path.name}.shared"
    problem = ""
    if group.is_leader:
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            problem = f"cannot write to {mark.parent}: {error.strerror or error}"
    group.barrier()
    if not problem and not mark.exists():
        problem = (
            f"a process does not see what rank 0 wrote to {mark.parent}: the run directory must be on a file system "
            "that all machines share"
        )
    try:
        _raise_together(group, problem)
    finally:
        if group.is_leader:
            mark.unlink(missing_ok=True)


def _raise_together(group: Group, problem: str) -> None:
    """Raise a `RunError` in all processes if one has a problem."""
    problems = [found for found in group.all_gather([problem] * len(group.local_range(group.num_ranks))) if found]
    if problems:
        raise RunError(problems[0])


def useful_workers(config: Config) -> int:
    """One process per accelerator, or else per core, up to one per member; a single one for little work."""
    device = find_device(config.device, option="--device")
    num_devices = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1
    num_seen = (config.data.max_train or math.inf) * config.train.epochs * config.members
    is_little = config.data.name in SMALL_DATA_SETS or num_seen < FEW_EXAMPLES or config.train.engine == "stacked"
    return 1 if is_little else min(config.members, num_cores() if device.type == "cpu" else num_devices)


def run_in_group(
    group: Group, spec: RunSpec, stop: StopFlag, on_begin: Callable[[], None] | None = None
) -> dict[str, Any]:
    """What every process of a run does; all return the result.

    `spec.resume` is set only where there is a run. The leading process calls `on_begin` once the directory belongs to
    this run.
    """
    config, run = spec.config, spec.directory
    if spec.resume:
        _check_same(config, Config.from_json(run.read_config()), spec.path)
    domain = load_domain(config)
    teacher = None if config.train.teacher is None else load_ensemble(config.train.teacher)
    training = build(config, group, domain, teacher)  # errors show before anything is written or removed
    notices = _resume(config, run, training) if spec.resume else []
    if not spec.resume:
        if group.is_leader:
            run.create(config.to_json(), overwrite=True)  # whether it may be was checked
        group.barrier()
    if on_begin is not None and group.is_leader:
        on_begin()
    options = spec.checkpoints
    with contextlib.ExitStack() as stack:
        writer = CheckpointWriter(
            run.checkpoints, group=group, num_members=config.members, keep=options.keep, background=options.background
        )
        stack.enter_context(writer)
        recorder = Recorder(run, writer, config, minutes=options.minutes, stop=stop, notices=notices)
        callbacks: list[Callback] = [*callbacks_for(config, run.log), recorder]
        callbacks += spec.callbacks if group.is_leader else ()
        if spec.make_callback is not None and group.is_leader:
            callbacks.append(stack.enter_context(spec.make_callback()))
        stop.is_training = 1
        training.run(callbacks)
        recorder.finish(training)
        stop.is_training = 0
        if group.is_leader:
            domain.write_files(run)
        return _finish(config, run, training, domain.card())


def check_alike(config: Config, path: Path) -> None:
    """Raise if a directory holds a run that could not be compared with this configuration.

    Options that only say where things are do not matter; a run that cannot be read is ignored.
    """
    try:
        found = Config.from_json(RunDirectory(path).read_config())
    except PapaError:
        return
    _check_same(config, found, path, ignored=("device", "analysis", "data.root"))


def _check_same(config: Config, found: Config, path: Path, ignored: Collection[str] = ()) -> None:
    """Raise if a run differs from a config in an option that its method uses."""
    there, ignored = dict(flat(found.to_json())), {*ignored, *idle_options(config.method)}
    differences = [
        f"{option_of(key)} is {there[key]!r} in the run, and {value!r} here"
        for key, value in flat(config.to_json())
        if there[key] != value and key not in ignored
    ]
    if differences:
        listing = "\n".join(f"  {difference}" for difference in differences)
        raise RunError(f"{path} holds a run of another configuration; nothing was changed:\n{listing}")


def _resume(config: Config, run: RunDirectory, training: Training) -> list[str]:
    """Continue from the newest complete checkpoint; returns notices for the user."""
    remedy = f"start again with papa run {config.recipe} --overwrite and the options in its config.json"
    state, notices = resume_(training, run.checkpoints, partial(_check_state, config), remedy)
    if state is None and run.metrics.exists():  # else it was stopped before it began
        notices.append(f"there is no checkpoint in {run.checkpoints}: starting with the first step")
    if training.group.is_leader:
        run.make_directories()
        run.rewind_metrics(None if state is None else state["metrics"])
    training.group.barrier()
    return notices


def _check_state(config: Config, path: Path, state: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint belongs to this run."""
    found = state.get("config")
    if not isinstance(found, dict) or not is_metrics_state(state.get("metrics")):
        raise DamagedError(f"{path} has a manifest without config or metrics: it was altered or damaged")
    _check_same(config, Config.from_json(found), path)


def _finish(config: Config, run: RunDirectory, training: Training, card: Mapping[str, Any]) -> dict[str, Any]:
    """Make soups, score everything, and write networks, result and report."""
    outcome = finalize_run(training, config)
    if outcome.analysis is not None and training.group.is_leader:
        for kind, found in outcome.analysis.to_json().items():
            run.log({"event": kind, "step": training.step, **found})
    for member, network in zip(training.members, training.population, strict=True):
        if member not in training.population.dropped:
            run.save_member(member, network)
    events = list(run.read_metrics()) if training.group.is_leader else []
    averagings = [event for event in events if event["event"] == "average"]
    result = {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "config": config.to_json(),
        "network": card,
        "environment": environment(training),
        **outcome.to_json(),
        "num_averagings": training.averager.num_averagings,
        "communication": {  # bytes sent by rank 0, and seconds it waited
            "bytes": sum(event["bytes"] for event in averagings),
            "seconds": round(sum(event["seconds"] for event in averagings), 6),
        },
        "policies": [policy.to_dict() for policy in policies_for(config)],
        "paper": paper_scores(config),
        "paper_details": paper_details(config),
        "paper_soups": paper_soups(config),
        "failed_checkpoints": sum(event["event"] == "checkpoint-failed" for event in events),
    }
    training.group.barrier()
    if training.group.is_leader:
        soups = outcome.training
        best = None if soups.best_soup is None else soups.best_soup.network
        run.save_soups(soups.average_soup, soups.greedy.network, best)
        picture = prediction_picture(training, soups.greedy.network)
        if picture is not None:
            write_atomically(run.picture, picture)
        write_atomically(run.report, run_page(as_stored(result), fold_merges(events)))
        write_json(run.result, result)
    return as_stored(result)


def environment(training: Training) -> dict[str, Any]:
    """What a reader needs to know to reproduce a result."""
    return {
        "papa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "compiled": kernels.library() is not None,
        "device": str(training.device),
        "workers": training.group.num_ranks,
        "command": " ".join(["papa", *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
