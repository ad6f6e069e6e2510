"""Executing a config: train, make soups, write the run directory."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from papa._version import __version__
from papa.averager import Averaging
from papa.checkpoint import load_checkpoint, read_json, save_checkpoint, write_atomically, write_json
from papa.config import Config
from papa.errors import RunError
from papa.recipes.build import build, policies_for
from papa.report import run_page
from papa.runs import RunDirectory
from papa.training import EpochRecord, Hook, Training, harvest


def execute(
    config: Config, path: Path, *, overwrite: bool = False, resume: bool = False, hooks: Sequence[Hook] = ()
) -> dict[str, Any]:
    """Run a config in a directory and return what its `result.json` holds.

    Args:
        config: what to run.
        path: where its files go.
        overwrite: replace a run that is there.
        resume: continue a run that is there; a finished one is not run again.
        hooks: told of the training while it runs.
    """
    config.check()
    run = RunDirectory(path)
    if resume and run.holds_run:
        _check_same(config, Config.from_json(run.read_config()), path)
        if run.is_finished:
            finished: dict[str, Any] = read_json(run.result)
            return finished
    else:
        training = build(config)  # whatever is wrong shows before anything is written or removed
        run.create(config.to_json(), overwrite=overwrite)
        return _train(config, run, training, hooks)
    training = build(config)
    _continue(run, training)
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
    if checkpoint is None:
        run.rewind(0)
        return
    manifest, members = load_checkpoint(checkpoint)
    training.load_checkpoint_(manifest["step"], manifest["state"], members)
    run.rewind(training.step)


def _train(config: Config, run: RunDirectory, training: Training, hooks: Sequence[Hook]) -> dict[str, Any]:
    training.run([Recorder(run), *hooks])
    outcome = harvest(training)
    for member, network in zip(training.members, training.population, strict=True):
        run.save_member(member, network)
    run.save_soups(outcome.average_soup, outcome.greedy.network)
    result = {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "config": config.to_json(),
        "environment": environment(training),
        **outcome.to_json(),
        "policies": [policy.to_dict() for policy in policies_for(config)],
    }
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
        self.run.log(
            {
                "event": "average",
                "step": averaging.step,
                "rule": averaging.rule,
                "alpha": averaging.alpha,
                "distance_before": None if before is None else sum(before) / len(before),
                "distance_after": None if after is None else sum(after) / len(after),
            }
        )

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """One line per epoch, and a checkpoint."""
        self.run.log(
            {
                "event": "epoch",
                "step": record.step,
                "epoch": record.epoch,
                "lr": record.lr,
                "losses": record.losses,
                "validation": [member.score for member in record.validation],
                "validation_ensemble": record.validation_ensemble.score,
                "distances": record.distances,
            }
        )
        save_checkpoint(self.run.checkpoints, training.step, training.member_states(), training.state_dict())


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
        "command": " ".join(["papa", *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
