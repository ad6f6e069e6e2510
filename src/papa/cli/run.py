"""`papa run RECIPE`: train one population."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.arguments import parse
from papa.cli.execution import OneRunOptions, is_main_process, note_unused
from papa.cli.recipe_argument import take_budget, take_recipe, take_value
from papa.cli.status import event_text
from papa.cli.tables import print_table
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import NEVER_AVERAGED, Config, flat, settled
from papa.lab.recipes import RECIPES, Recipe
from papa.lab.recipes.change import changed
from papa.lab.report.metric import is_soup_far_worse
from papa.lab.report.table import COLUMNS, details_table, run_rows
from papa.lab.runs import RunDirectory
from papa.storage import read_object

USAGE = """usage: papa run RECIPE [OPTIONS]
       papa run --config FILE [OPTIONS]

Trains one population and writes its networks, scores and report.
`papa ls` lists the recipes; `papa run RECIPE --help` lists all options.
--config takes the configuration from a file, such as the config.json of a run or a part of one, instead of a recipe;
entries that are missing have the values of the recipe it names. Other options override it.
An option may be shortened to its ending where only one ends so: --epochs for --train.epochs.
--budget full is the paper's setting, mini takes ten to twenty minutes on two CPU cores, smoke takes seconds.
On SIGINT (Ctrl-C) or SIGTERM it finishes the step, saves and exits with code 75; a second signal ends it at once.

examples:
  papa run digits
  papa run digits --method independent --seed 2 --out runs/alone
  papa run digits --train.epochs 60 --average.half-life 0.01
  papa run digits --out runs/mine --resume
  papa run --config runs/mine/config.json --seed 2 --out runs/again
  papa run images --data.root photos --epochs 60
  papa run cifar10-vgg11 --budget mini --data.root ~/data
  torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m papa run cifar10-vgg11 --members 4 --out /shared/run
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(OneRunOptions):
    """Options of `papa run`."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Directory of the run; by default runs/RECIPE[-BUDGET]-METHOD-seedN."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing run."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue an existing run."""


def main(arguments: Sequence[str]) -> int:
    recipe, rest, is_from_file = take_recipe_or_file(arguments)
    options, name = parse(lambda config: RunOptions(config=config), recipe, rest, command="run")
    if options.overwrite and options.resume:
        raise ConfigError("--overwrite removes the run that --resume would continue: give one of them")
    config = settled(options.config).check()
    note_unused([config], recipe.config(take_budget(rest)[0]))
    path = options.out or Path("runs") / f"{name}-{config.method}-seed{config.seed}"
    if options.resume and not is_from_file:
        config = config_to_resume(config, recipe, rest, path)
    result = options.execute(config, path, overwrite=options.overwrite, resume=options.resume)
    print_run(result, RunDirectory(path))
    return 0


def take_recipe_or_file(arguments: Sequence[str]) -> tuple[Recipe, list[str], bool]:
    """The recipe, or the configuration in the file of --config as one; the remaining arguments; whether it is a file's.

    A recipe may be named beside a file too; it must be the file's then.
    """
    given, rest = take_value("--config", arguments, ", the file of a configuration such as config.json")
    if given is None or set(rest) & {"-h", "--help"}:
        return *take_recipe(arguments, USAGE), False
    file = Path(given)
    config = read_config_file(file / "config.json" if file.is_dir() else file)
    if take_budget(rest)[0] is not None:
        raise ConfigError("--budget and --config both set the defaults of other options: give one of them")
    if rest and not rest[0].startswith("-"):
        name, *rest = rest
        if name != config.recipe:
            raise ConfigError(f"{file} is a configuration of {config.recipe}, found the recipe {name}: leave it out")
    return Recipe(config.recipe, f"the configuration in {file}", lambda budget: config), rest, True


def read_config_file(file: Path) -> Config:
    """The configuration in a JSON file; a `ConfigError` lists everything that is wrong with it."""
    values, problems = read_object(file), []
    recipe = values.get("recipe", Config.recipe)
    if recipe != Config.recipe and recipe not in RECIPES:  # the name becomes a part of a path
        problems.append(f"config.recipe is {recipe!r}: {did_you_mean(str(recipe), [Config.recipe, *RECIPES])}")
    config = None
    try:
        config = Config.from_json(values, RECIPES[recipe].config() if recipe in RECIPES else None)
    except ConfigError as error:
        problems += str(error).splitlines()
    if config is None or problems:
        raise ConfigError("\n  ".join([f"{file} is no configuration:", *problems]))
    return config


def config_to_resume(config: Config, recipe: Recipe, arguments: Sequence[str], path: Path) -> Config:
    """The config of the run in a directory, changed by the arguments; `config` where there is no run.

    Options that are not given keep the values of the run; `execute` refuses options that differ from them.
    """
    run = RunDirectory(path)
    if not run.holds_run:
        if is_main_process():
            print(f"nothing to resume in {path}: starting a new run")
        return config
    if config.method == "longer":  # whose number of epochs follows from the arguments
        return config
    defaults = dict(flat(recipe.config().to_json()))
    budget_config = recipe.config(take_budget(arguments)[0])
    changes = {key: value for key, value in flat(budget_config.to_json()) if value != defaults[key]}
    existing = changed(Config.from_json(run.read_config()), {"recipe": recipe.name, **changes})
    options, _ = parse(lambda _: RunOptions(config=existing), recipe, arguments, command="run")
    return options.config


def print_run(result: dict[str, Any], run: RunDirectory) -> None:
    """Print the result of a run and where its files are, in one process only."""
    if not is_main_process():
        return
    print_result(result)
    print(f"one network: {run.average_soup}\nreport:      {run.report}")
    if run.picture.exists():
        print(f"a picture:   {run.picture}")


def print_result(result: dict[str, Any]) -> None:
    """Print the table of a run, with the paper's numbers below, and what happened to unhealthy members."""
    print_table((result["method"], *COLUMNS), run_rows(result))
    print_details([result])
    for event in result.get("nonfinite") or []:
        print(event_text(event))


def print_details(results: Sequence[dict[str, Any]]) -> None:
    """Print the details of scores, such as the score of each class, and which runs never averaged."""
    head, details = details_table(results)
    if details:
        print()
        print_table(head, details)
    for result in results:
        if result["method"] not in NEVER_AVERAGED and not result["num_averagings"]:
            print(f"{result['method']}, seed {result['seed']}: training ended before the first averaging was due")
        if is_soup_far_worse(result):
            print(
                f"{result['method']}, seed {result['seed']}: the average soup is far worse than its members, which are "
                "too far apart: push more strongly (a shorter --average.half-life), or merge more often"
            )
