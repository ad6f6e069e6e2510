"""`papa run RECIPE`: train one population."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.options import (
    TrainingOptions,
    is_main_process,
    note_unused,
    parse_recipe,
    take_budget,
    take_recipe,
    take_value,
)
from papa.cli.tables import event_text, print_table
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import NEVER_AVERAGED, Config, changed
from papa.lab.recipes import RECIPES, Recipe
from papa.lab.report.metric import metric_of
from papa.lab.report.table import COLUMNS, details_table, run_rows
from papa.lab.report.words import verdict_text
from papa.lab.runs import RunDirectory
from papa.storage import read_object

USAGE = """usage: papa run RECIPE [OPTIONS]        (papa ls lists recipes and methods)
Trains one population, and writes its networks, scores and a report.

  --method NAME          papa, papa-all, papa-2, independent, longer ...
  --members N            networks in the population
  --seed N               of all random numbers
  --budget mini|smoke    a smaller version: some minutes, or seconds
  --data.root DIR        where the data is, or is downloaded to
  --max-train N          use fewer training examples
  --model.name NAME      the network; timm:NAME for any network of timm
  --epochs N             passes over the data
  --batch-size N         examples per step
  --train.lr X           the learning rate
  --half-life X          papa: of the distance to the mean, a share of training
  --every-epochs X       merges: epochs between them
  -o, --out DIR          the run; default runs/RECIPE-METHOD-seedN
  --resume, --overwrite  continue or replace the run that is there
  --workers N            processes; --device cuda:1 chooses where
  --config FILE          a config.json instead of the recipe

papa run RECIPE --help-all shows all options with their defaults.
examples: papa run digits --method papa-all --members 3 --out runs/mine
  papa run images --data.root photos --epochs 60
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingOptions):
    """Options of `papa run`."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Directory of the run; by default runs/RECIPE[-BUDGET]-METHOD-seedN."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing run."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue an existing run."""


def main(arguments: Sequence[str]) -> int:
    options, base, name = parse_run(arguments)
    options.check()
    config = options.config.settled
    note_unused([config], base)
    path = options.out or Path("runs") / f"{name}-{config.method}-seed{config.seed}"
    if options.overwrite and options.resume:
        raise ConfigError("--overwrite removes the run that --resume would continue: give one of them")
    if options.resume:
        config = config_to_resume(config, arguments, path)
    result = options.execute(config, path, overwrite=options.overwrite, resume=options.resume)
    print_run(result, RunDirectory(path))
    return 0


def parse_run(arguments: Sequence[str]) -> tuple[RunOptions, Config, str]:
    """The options, the config that they change, and a name for the run."""
    recipe, rest = take_recipe_or_file(arguments)
    options, name = parse_run_of(recipe, rest)
    return options, recipe.config(take_budget(rest)[0]), name


def parse_run_of(recipe: Recipe, arguments: Sequence[str]) -> tuple[RunOptions, str]:
    """The options that follow the recipe, and a name for the run."""
    options, coupling, name = parse_recipe(lambda config: RunOptions(config=config), recipe, arguments, command="run")
    config = replace(options.config, coupling=coupling) if coupling else options.config
    return replace(options, config=config), name


def take_recipe_or_file(arguments: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe, or the configuration in the file of --config as one, and the remaining arguments.

    A recipe may be named beside a file too; it must be the file's then.
    """
    given, rest = take_value("--config", arguments, ", the file of a configuration such as config.json")
    if given is None:
        return take_recipe(arguments, USAGE)
    file = Path(given)
    config = read_config_file(file / "config.json" if file.is_dir() else file)
    if take_budget(rest)[0] is not None:
        raise ConfigError("--budget and --config both set the defaults of other options: give one of them")
    if rest and not rest[0].startswith("-"):
        name, *rest = rest
        if name != config.recipe:
            raise ConfigError(f"{file} is a configuration of {config.recipe}, found the recipe {name}: leave it out")
    return Recipe(config.recipe, f"the configuration in {file}", lambda budget: config), rest


def read_config_file(file: Path) -> Config:
    """The configuration in a JSON file; a `ConfigError` lists everything that is wrong with it."""
    values, problems = read_object(file), []
    recipe = values.get("recipe", Config.recipe)
    if recipe != Config.recipe and recipe not in RECIPES:
        problems.append(f"config.recipe is {recipe!r}: {did_you_mean(str(recipe), RECIPES)}")
    try:
        config = Config.from_json(values, RECIPES[recipe].config() if recipe in RECIPES else None)
    except ConfigError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n  ".join([f"{file} is no configuration:", *problems]))
    return config


def config_to_resume(config: Config, arguments: Sequence[str], path: Path) -> Config:
    """The config of the run in a directory, changed by the arguments; `config` where there is no run.

    Options that are not given keep the values of the run; `execute` refuses options that differ from them.
    """
    run = RunDirectory(path)
    if not run.holds_run:
        if is_main_process():
            print(f"nothing to resume in {path}: starting a new run")
        return config
    single = config.method in ("longer", "larger-batches")  # whose length follows from all the arguments
    if single or take_value("--config", arguments)[0] is not None or take_budget(arguments)[0] is not None:
        return config
    existing = changed(Config.from_json(run.read_config()), {"recipe": config.recipe})
    recipe = Recipe(config.recipe, "", lambda budget: existing)
    return parse_run_of(recipe, arguments[1:])[0].config


def print_run(result: dict[str, Any], run: RunDirectory) -> None:
    """Print the result of a run, the verdict, where its files are, and which to take; in one process only."""
    if not is_main_process():
        return
    print_table((result["method"], *COLUMNS), run_rows(result))
    print_details([result])
    for event in result.get("nonfinite") or []:
        print(event_text(event))
    if verdict := verdict_text(result):
        print(f"\n{verdict}")
    print(f"report: {run.report}")
    if run.picture.exists():
        print(f"a picture: {run.picture}")
    print(f"take: {file_to_take(result, run)}")


def file_to_take(result: dict[str, Any], run: RunDirectory) -> str:
    """The file of the network to use, and why: the average soup, unless the verdict speaks against it."""
    verdict = result.get("verdict")
    if not verdict:
        return str(run.average_soup)
    if verdict["kind"] in ("helps", "too close"):
        return f"{run.average_soup} (the average of all members)"
    sign = 1.0 if metric_of([result]).higher_is_better else -1.0
    members = (result.get("validation") or {}).get("members", ())
    scores = {member: sign * score for member, score in enumerate(members) if score is not None}
    if not scores:
        return f"nothing of {run.path}: no member is finite"
    best = run.members / f"{max(scores, key=lambda member: scores[member]):03d}.safetensors"
    return f"{best} (the best member: the soup is no better), or all of {run.members} as an ensemble"


def print_details(results: Sequence[dict[str, Any]]) -> None:
    """Print the details of scores, such as the score of each class, and which runs averaged too weakly or never."""
    head, details = details_table(results)
    if details:
        print()
        print_table(head, details)
    for result in results:
        name, verdict = f"{result['method']}, seed {result['seed']}", result.get("verdict") or {}
        if result["method"] in NEVER_AVERAGED:
            continue
        if not result["num_averagings"]:
            print(f"{name}: training ended before the first averaging was due")
        if len(results) > 1 and verdict.get("kind") == "too far":
            print(f"{name}: {verdict['advice']}")
