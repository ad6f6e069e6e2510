"""Executing a config: train, make soups, write the run directory."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from papa._version import __version__
from papa.averager import Averaging
from papa.checkpoint import load_checkpoint, read_json, save_checkpoint, write_atomically, write_json
from papa.config import Config
from papa.errors import ConfigError, RunError
from papa.group import Group, Local, start_workers
from papa.recipes import paper_scores
from papa.recipes.build import build, find_device, hooks_for, policies_for, sizes
from papa.recipes.picture import prediction_picture
from papa.report import run_page
from papa.runs import RunDirectory
from papa.training import EpochRecord, Hook, Training, harvest

Watch: TypeAlias = Callable[[], AbstractContextManager[Hook]]
"""Makes something that looks on while the leading process trains."""

WORK_FOR_MORE_WORKERS = 1e10
"""Examples seen times parameters, below which starting a second process costs more than it saves."""


def execute(
    config: Config,
    path: Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run a config in a directory and return what its `result.json` holds.

    Args:
        config: what to run.
        path: where its files go.
        workers: how many processes hold the members; None for as many as help. The result does not depend on it.
        overwrite: replace a run that is there.
        resume: continue a run that is there; a finished one is not run again.
        watch: makes a hook for the leading process; it must be possible to pickle it.
    """
    config.check()
    if resume and RunDirectory(path).is_finished:
        workers = 1
    num_workers = useful_workers(config) if workers is None else workers
    if not 1 <= num_workers <= config.members:
        raise ConfigError(
            f"--workers is {num_workers}, expected 1 to {config.members}: a worker holds at least one of the members"
        )
    arguments = (config, path, overwrite, resume, watch)
    if num_workers == 1:
        return _job(Local(), *arguments)
    result: dict[str, Any] = start_workers(_job, num_workers, config.members, *arguments)
    return result


def useful_workers(config: Config) -> int:
    """One process per accelerator, or else per core, up to one per member; one in all where the work is tiny."""
    device = find_device(config.device)
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
    group: Group, config: Config, path: Path, overwrite: bool, resume: bool, watch: Watch | None
) -> dict[str, Any]:
    """What every process does; all return the result."""
    run = RunDirectory(path)
    is_there, is_finished = run.holds_run, run.is_finished
    group.wait()  # nobody writes before everybody has looked
    if resume and is_there:
        _check_same(config, Config.from_json(run.read_config()), path)
        if is_finished:
            finished: dict[str, Any] = read_json(run.result)
            return finished
        training = build(config, group)
        _continue(run, training)
    else:
        training = build(config, group)  # whatever is wrong shows before anything is written or removed
        if group.leads:
            run.create(config.to_json(), overwrite=overwrite)
        group.wait()
    with contextlib.ExitStack() as stack:
        hooks: list[Hook] = [*hooks_for(config), Recorder(run)]
        if watch is not None and group.leads:
            hooks.append(stack.enter_context(watch()))
        return _train(config, run, training, hooks)


def _check_same(config: Config, found: Config, path: Path) -> None:
    asked, there = _flat(config.to_json()), _flat(found.to_json())
    differences = [
        f"{key} is {there[key]!r}, asked for {value!r}" for key, value in asked.items() if there[key] != value
    ]
    if differences:
        listing = "\n".join(f"  {difference}" for difference in differences)
        raise RunError(f"{path} holds a run of another configuration; nothing was changed:\n{listing}")


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, part in value.items():
        if isinstance(part, dict):
            flat.update(_flat(part, f"{prefix}{key}."))
        else:
            flat[prefix + key] = part
    return flat


def _continue(run: RunDirectory, training: Training) -> None:
    checkpoint = run.latest_checkpoint()
    if checkpoint is not None:
        manifest, members = load_checkpoint(checkpoint, training.members)
        training.load_checkpoint_(manifest["step"], manifest["state"], members)
    training.group.wait()
    if training.group.leads:
        run.rewind(training.step)


def _train(config: Config, run: RunDirectory, training: Training, hooks: Sequence[Hook]) -> dict[str, Any]:
    training.run(hooks)
    outcome = harvest(training)
    for member, network in zip(training.members, training.population, strict=True):
        run.save_member(member, network)
    result = {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "config": config.to_json(),
        "environment": environment(training),
        **outcome.to_json(),
        "num_averagings": training.averager.num_averagings,
        "policies": [policy.to_dict() for policy in policies_for(config)],
        "paper": paper_scores(config),
    }
    training.group.wait()
    if training.group.leads:
        run.save_soups(outcome.average_soup, outcome.greedy.network)
        picture = prediction_picture(training, outcome.greedy.network)
        if picture is not None:
            write_atomically(run.picture, picture)
        write_atomically(run.report, run_page(result, run.read_metrics()))
        write_json(run.result, result)
    return result


class Recorder(Hook):
    """Writes a run's metrics and checkpoints."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """One line per averaging."""
        before, after = averaging.distances_before, averaging.distances_after
        self._log(
            training,
            {
                "event": "average",
                "step": averaging.step,
                "rule": averaging.rule,
                "alpha": averaging.alpha,
                "distance_before": None if before is None else sum(before) / len(before),
                "distance_after": None if after is None else sum(after) / len(after),
            },
        )

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """One line per epoch, and a checkpoint."""
        self._log(
            training,
            {
                "event": "epoch",
                "step": record.step,
                "epoch": record.epoch,
                "lr": record.lr,
                "losses": record.losses,
                "validation": [member.score for member in record.validation],
                "validation_ensemble": record.validation_ensemble.score,
                "distances": record.distances,
            },
        )
        save_checkpoint(
            self.run.checkpoints,
            training.step,
            training.member_states(),
            training.state_dict(),
            group=training.group,
        )

    def _log(self, training: Training, event: dict[str, Any]) -> None:
        if training.group.leads:
            self.run.log(event)


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
