"""Executing a config: train, make soups, write the run directory."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from papa._version import __version__
from papa.checkpoint import (
    CheckpointWriter,
    DamagedError,
    discard,
    read_object,
    write_atomically,
    write_json,
)
from papa.errors import ConfigError, PapaError, RunError
from papa.group import Group, LocalGroup, Torchrun, rank_of_torchrun, start_workers
from papa.lab.config import Config, idle_options
from papa.lab.recipes import paper_details, paper_scores, paper_soups
from papa.lab.recipes.build import build, callbacks_for, images_for, policies_for, sizes
from papa.lab.recipes.loading import card_for
from papa.lab.recipes.picture import prediction_picture
from papa.lab.recorder import Recorder
from papa.lab.report import run_page
from papa.lab.report.fields import flat
from papa.lab.runs import RunDirectory, fold_merges, is_metrics_state
from papa.lab.signals import stop_flag
from papa.process import find_device
from papa.training import Callback, Training, finalize
from papa.training.saving import resume_

CallbackFactory: TypeAlias = Callable[[], AbstractContextManager[Callback]]
"""Makes something that looks on while the leading process trains."""

WORK_FOR_MORE_WORKERS = 1e10
"""Examples seen times parameters, below which starting a second process costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How often checkpoints are written, and how many stay; the result does not depend on it."""

    minutes: float = 10.0
    """Besides at the end of each epoch, after so many minutes without one."""
    keep: int = 2
    """How many stay."""
    background: bool = True
    """Whether training goes on while a copy of its state is written, or waits and needs no memory for a copy."""

    def check(self) -> None:
        """Raise a `ConfigError` where this makes no sense."""
        if not self.minutes > 0:
            raise ConfigError(f"--checkpoint-minutes is {self.minutes}, expected more than 0")
        if self.keep < 1:
            raise ConfigError(f"--keep is {self.keep}, expected at least 1: the newest checkpoint stays")


def execute(
    config: Config,
    path: Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    saving: Saving = Saving(),  # noqa: B008
    make_callback: CallbackFactory | None = None,
    stop: Any = None,
) -> dict[str, Any]:
    """Run a config in a directory and return what its `result.json` holds.

    On SIGINT or SIGTERM the run finishes its step, saves and raises `StoppedError`; a second one ends it at once.

    Args:
        config: what to run.
        path: where its files go.
        workers: how many processes hold the members; None for as many as help. The result does not depend on it. Under
            torchrun its processes hold them, and this must be None.
        overwrite: replace a run that is there.
        resume: continue a run that is there; a finished one is not run again.
        saving: how often checkpoints are written.
        make_callback: makes a callback for the leading process; it must be possible to pickle it.
        stop: where somebody else listens for signals, what notes them: a number in shared memory, as in `watching_signals`.
    """
    config.check()
    saving.check()
    run = RunDirectory(path)
    if rank_of_torchrun() is not None:
        return _execute_under_torchrun(config, path, workers, overwrite, resume, saving, make_callback, stop)
    if resume and run.is_finished:
        _check_same(config, Config.from_json(run.read_config()), path)
        return run.read_result()
    if workers is not None and not 1 <= workers <= config.members:
        raise ConfigError(
            f"--workers is {workers}, expected 1 to {config.members}: a worker holds at least one of the members"
        )
    with run.lock():
        if not resume:
            run.check_free(overwrite=overwrite)  # before data is read and networks are made, which may take long
        num_workers = useful_workers(config) if workers is None else workers
        with stop_flag(stop) as stop:  # not before: until now a signal ends all at once, and there is nothing to save
            arguments = (config, path, overwrite, resume, saving, make_callback, stop)
            if num_workers == 1:
                return _job(LocalGroup(), *arguments)
            result: dict[str, Any] = start_workers(_job, num_workers, config.members, *arguments)
            return result


def _execute_under_torchrun(
    config: Config,
    path: Path,
    workers: int | None,
    overwrite: bool,
    resume: bool,
    saving: Saving,
    make_callback: CallbackFactory | None,
    stop: Any,
) -> dict[str, Any]:
    if workers is not None:
        raise ConfigError(f"--workers is {workers}, but torchrun says how many there are: leave it out")
    processes, run = Torchrun(config.average.exchange), RunDirectory(path)
    group = processes.group(config.members)
    facts = {**dict(flat(config.to_json())), "out": path, "papa": __version__, "torch": torch.__version__}
    facts |= {"overwrite": overwrite, "resume": resume}
    group.check_same({name: str(fact) for name, fact in facts.items()}, cure="start all with the same options")
    _check_shared(path, group)
    # torchrun may start all anew, with the options of the first time: what was begun is continued.
    is_restart = run.holds_run and run.torchrun.exists() and processes.is_restart_of(read_object(run.torchrun))
    overwrite, resume = overwrite and not is_restart, resume or is_restart
    is_finished = run.is_finished
    if not resume:
        run.check_free(overwrite=overwrite)  # all look at the same directory, so all are refused
    group.barrier()  # nobody writes before everybody has looked
    if resume and is_finished:
        _check_same(config, Config.from_json(run.read_config()), path)
        return run.read_result()
    with run.lock() if group.is_leader else contextlib.nullcontext(), stop_flag(stop) as stop:
        begun = partial(write_json, run.torchrun, processes.names)
        return _job(group, config, path, overwrite, resume, saving, make_callback, stop, begun)


def _check_shared(path: Path, group: Group) -> None:
    """Raise unless all processes see the run directory that the leading one sees."""
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
    problems = [found for found in group.all_gather([problem] * len(group.local_range(group.num_ranks))) if found]
    if group.is_leader:
        mark.unlink(missing_ok=True)
    if problems:
        raise RunError(problems[0])


def useful_workers(config: Config) -> int:
    """One process per accelerator, or else per core, up to one per member; one in all where the work is tiny."""
    device = find_device(config.device, option="--device")
    num_devices = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1
    most = min(config.members, usable_cores() if device.type == "cpu" else num_devices)
    if most == 1:
        return 1
    num_parameters, num_examples = sizes(config)
    work = float(num_parameters) * num_examples * config.train.epochs * config.members
    return most if work >= WORK_FOR_MORE_WORKERS else 1


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _job(
    group: Group,
    config: Config,
    path: Path,
    overwrite: bool,
    resume: bool,
    saving: Saving,
    make_callback: CallbackFactory | None,
    stop: Any,
    begun: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """What every process does; all return the result. The leading one calls `begun` when the directory is its run's."""
    run = RunDirectory(path)
    is_there = run.holds_run
    group.barrier()  # nobody writes before everybody has looked
    notices: list[str] = []
    if resume and is_there:
        _check_same(config, Config.from_json(run.read_config()), path)
        images = images_for(config)
        training = build(config, group, images)
        notices = _continue(config, run, training)
    else:
        images = images_for(config)
        training = build(config, group, images)  # whatever is wrong shows before anything is written or removed
        if group.is_leader:
            run.create(config.to_json(), overwrite=overwrite)
        group.barrier()
    if begun is not None and group.is_leader:
        begun()
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(
            CheckpointWriter(
                run.checkpoints,
                group=group,
                num_members=config.members,
                keep=saving.keep,
                background=saving.background,
            )
        )
        recorder = Recorder(run, writer, config, minutes=saving.minutes, stop=stop, notices=notices)
        callbacks: list[Callback] = [*callbacks_for(config, run.log), recorder]  # which saves what the others logged
        if make_callback is not None and group.is_leader:
            callbacks.append(stack.enter_context(make_callback()))
        return _train(config, run, training, callbacks, recorder, card_for(config, images))


def check_alike(config: Config, path: Path) -> None:
    """Raise where a directory holds a run that could not be compared with this configuration's.

    What only says where things are is left to `execute`; what cannot be read is not looked at.
    """
    try:
        found = Config.from_json(RunDirectory(path).read_config())
    except PapaError:
        return
    _check_same(config, found, path, beside=("device", "analysis", "data.root"))


def _check_same(config: Config, found: Config, path: Path, beside: Collection[str] = ()) -> None:
    """Raise where a run differs from what is asked for in an option that its method looks at."""
    there, beside = dict(flat(found.to_json())), {*beside, *idle_options(config.method)}
    differences = [
        f"{key} is {there[key]!r}, asked for {value!r}"
        for key, value in flat(config.to_json())
        if there[key] != value and key not in beside
    ]
    if differences:
        listing = "\n".join(f"  {difference}" for difference in differences)
        raise RunError(f"{path} holds a run of another configuration; nothing was changed:\n{listing}")


def _continue(config: Config, run: RunDirectory, training: Training) -> list[str]:
    """Go on from the newest checkpoint that is whole; returns what people should know about how."""
    found, notices = resume_(training, run.checkpoints, partial(_check_state, config)), []
    if found.state is None:
        if found.damaged:
            listing = "\n".join(f"  {error}" for error in found.damaged.values())
            raise RunError(
                f"no checkpoint of {run.path} can be read; start anew with --overwrite of papa run {config.recipe} "
                f"and the options in its config.json:\n{listing}"
            )
        notices.append(f"there is no checkpoint in {run.checkpoints}: beginning with the first step")
    if training.group.is_leader:
        run.make_directories()
        run.rewind_metrics(None if found.state is None else found.state["metrics"])
        for path in found.damaged:
            discard(path)
    training.group.barrier()
    return [*notices, *(f"{error}; continuing from step {training.step}" for error in found.damaged.values())]


def _check_state(config: Config, path: Path, state: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint is one of this run."""
    found = state.get("config")
    if not isinstance(found, dict) or not is_metrics_state(state.get("metrics")):
        raise DamagedError(f"{path} has a manifest without config or metrics: it was altered or damaged")
    _check_same(config, Config.from_json(found), path)


def _train(
    config: Config,
    run: RunDirectory,
    training: Training,
    callbacks: Sequence[Callback],
    recorder: Recorder,
    card: dict[str, Any],
) -> dict[str, Any]:
    training.run(callbacks)
    recorder.finish(training)
    average = config.average
    outcome = finalize(
        training,
        align_soups=average.align_soups,
        analysis=config.analysis,
        num_align_batches=average.align_batches,
        num_batch_norm_batches=config.trajectory.batch_norm_batches,
    )
    if outcome.analysis is not None and training.group.is_leader:
        for kind, found in outcome.analysis.to_json().items():
            run.log({"event": kind, "step": training.step, **found})
    for member, network in zip(training.members, training.population, strict=True):
        if member not in training.population.dropped:
            run.save_member(member, network)
    result = {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "config": config.to_json(),
        "network": card,
        "environment": environment(training),
        **outcome.to_json(),
        "num_averagings": training.averager.num_averagings,
        "communication": communication(run.read_metrics()) if training.group.is_leader else None,
        "policies": [policy.to_dict() for policy in policies_for(config)],
        "paper": paper_scores(config),
        "paper_details": paper_details(config),
        "paper_soups": paper_soups(config),
    }
    training.group.barrier()
    if training.group.is_leader:
        events = list(run.read_metrics())
        result["failed_checkpoints"] = sum(event["event"] == "checkpoint-failed" for event in events)
        run.save_soups(outcome.average_soup, outcome.greedy.network)
        picture = prediction_picture(training, outcome.greedy.network)
        if picture is not None:
            write_atomically(run.picture, picture)
        write_atomically(run.report, run_page(result, fold_merges(events)))
        write_json(run.result, result)
    return result


def communication(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What averaging cost over a whole run, from its metrics: bytes that rank 0 sent, and seconds it stood still.

    Example:
        >>> communication([{"event": "average", "bytes": 8, "seconds": 0.5}, {"event": "epoch"}])
        {'bytes': 8, 'seconds': 0.5}
    """
    averagings = [event for event in events if event["event"] == "average"]
    return {
        "bytes": sum(event["bytes"] for event in averagings),
        "seconds": round(sum(event["seconds"] for event in averagings), 6),
    }


def environment(training: Training) -> dict[str, Any]:
    """What a reader needs to know to make a result again."""
    return {
        "papa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(training.device),
        "workers": training.group.num_ranks,
        "command": " ".join(["papa", *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
