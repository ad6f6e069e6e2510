"""`papa run RECIPE`: train one population."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.arguments import SavingOptions, parse, speaks, take_budget, take_recipe
from papa.cli.progress import Progress, Together, told
from papa.cli.tables import print_table
from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.launch import CallbackFactory, execute
from papa.lab.recipes import Recipe
from papa.lab.recipes.change import changed
from papa.lab.report import COLUMNS, details_table, run_rows
from papa.lab.report.fields import flat
from papa.lab.report.tensorboard import EventFiles, check_tensorboard
from papa.lab.runs import RunDirectory
from papa.process import configure_process

NEVER_AVERAGED = "training was over before averaging was due"

USAGE = """usage: papa run RECIPE [OPTIONS]

Trains one population and writes its networks, scores and report.
`papa ls` lists the recipes; `papa run RECIPE --help` lists every option.
--budget full is the paper's setting, mini takes ten to twenty minutes on two CPU cores, smoke takes seconds.
On SIGINT (Ctrl-C) or SIGTERM it finishes the step, saves and leaves with code 75; a second signal ends it at once.

examples:
  papa run digits
  papa run digits --method independent --seed 2 --out runs/alone
  papa run digits --train.epochs 60 --average.half-life 0.01
  papa run digits --out runs/mine --resume
  papa run cifar10-vgg11 --budget mini --data.root ~/data
  torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m papa run cifar10-vgg11 --members 4 --out /shared/run
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(SavingOptions):
    """Options of `papa run`."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None
    """Where the run's files go; by default runs/RECIPE[-BUDGET]-METHOD-seedN."""
    workers: int | None = None
    """How many processes hold the members; None for as many as help. The result does not depend on it, but for the
    stacked engine's rounding."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a run that is there."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue a run that is there."""
    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write event files for TensorBoard too, into the run's directory tensorboard/."""


def main(arguments: Sequence[str]) -> int:
    """Train one population."""
    recipe, rest = take_recipe(arguments, USAGE)
    if recipe is None:
        return 0
    options, name = parse(lambda config: RunOptions(config=config), recipe, rest, command="run")
    if options.overwrite and options.resume:
        raise ConfigError("--overwrite removes the run that --resume would continue: give one of them")
    configure_process()
    config = options.config
    path = options.out or Path("runs") / f"{name}-{config.method}-seed{config.seed}"
    if options.resume:
        config = config_to_resume(config, recipe, rest, path)
    result = execute(
        config,
        path,
        workers=options.workers,
        overwrite=options.overwrite,
        resume=options.resume,
        saving=options.saving,
        make_callback=onlookers(config, path, tensorboard=options.tensorboard),
    )
    if speaks():
        print_run(result, RunDirectory(path))
    return 0


def onlookers(config: Config, path: Path, *, tensorboard: bool) -> CallbackFactory:
    """Who looks on while a run trains: the progress shown, and event files where they are asked for."""
    progress = partial(Progress, f"{config.recipe} {config.method} seed {config.seed}")
    if not tensorboard:
        return progress
    check_tensorboard()
    return partial(Together, progress, partial(EventFiles, path / "tensorboard"))


def print_run(result: dict[str, Any], run: RunDirectory) -> None:
    """Print what a run ends with: its table, and where its files are."""
    print_result(result)
    print(f"one network: {run.average_soup}\nreport:      {run.report}")
    if run.picture.exists():
        print(f"a picture:   {run.picture}")


def config_to_resume(asked: Config, recipe: Recipe, arguments: Sequence[str], path: Path) -> Config:
    """The config of the run that is there, with whatever the arguments name; to be compared with it.

    Args:
        asked: what the arguments say where there is no run.
        recipe: the one they name.
        arguments: what came after it.
        path: where the run is.
    """
    run = RunDirectory(path)
    if not run.holds_run:
        if speaks():
            print(f"nothing to resume in {path}: starting anew")
        return asked
    usual = dict(flat(recipe.config().to_json()))
    named = {"recipe": recipe.name} | {
        key: value for key, value in flat(recipe.config(take_budget(arguments)[0]).to_json()) if value != usual[key]
    }
    there = changed(Config.from_json(run.read_config()), named)
    options, _ = parse(lambda _: RunOptions(config=there), recipe, arguments, command="run")
    return options.config


def print_result(result: dict[str, Any]) -> None:
    """Print the table a run ends with, the paper's numbers below its own."""
    print_table((result["method"], *COLUMNS), run_rows(result))
    head, details = details_table([result])
    if details:
        print()
        print_table(head, details)
    if result["method"] != "independent" and not result["num_averagings"]:
        print(NEVER_AVERAGED)
    for event in result.get("nonfinite") or []:
        print(told(event))
