"""`papa compare RECIPE`: train several methods and seeds and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from papa.cli.arguments import parse, split_names, split_numbers
from papa.cli.execution import ParallelOptions, announce, is_main_process, note_unused, run_title
from papa.cli.recipe_argument import take_budget, take_recipe
from papa.cli.run import print_details
from papa.cli.tables import print_table
from papa.errors import ConfigError, RunError
from papa.lab.config import METHODS, Config, settled
from papa.lab.recipes import Recipe
from papa.lab.report.page import compare_page
from papa.lab.report.table import compare_table
from papa.lab.runs import RunDirectory, read_run
from papa.storage import write_atomically

if TYPE_CHECKING:
    from papa.lab.launch_many import Outcomes

USAGE = """usage: papa compare RECIPE [OPTIONS]

Trains a recipe with several methods and seeds, prints a table and writes one report about all of them.
Finished runs are not run again; stopped ones are resumed. An existing run with other options is an error.
On SIGINT (Ctrl-C) or SIGTERM the active runs save, and it exits with code 75: the same command continues.
A run that fails does not stop the others; it is named at the end.
--budget full is the paper's setting, mini takes ten to twenty minutes a run on two CPU cores, smoke takes seconds.

examples:
  papa compare digits
  papa compare digits --seeds 1,2,3
  papa compare digits --methods longer,papa          (longer: one network with the compute of all members)
  papa compare digits --methods independent,papa --members 10 --out runs/ten
  papa compare optdigits-logistic --methods independent,papa-all --seeds 1,2,3 --parallel 2 --data.root ~/data
"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ParallelOptions):
    """Options of `papa compare`."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    methods: str = "independent,papa,papa-all,papa-2"
    """Methods, separated by commas."""
    seeds: str = "1"
    """Seeds, separated by commas."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Directory of the runs, one subdirectory each; by default runs/compare-RECIPE[-BUDGET]."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace existing runs."""


def main(arguments: Sequence[str]) -> int:
    recipe, rest = take_recipe(arguments, USAGE)
    options, out = parse_options(recipe, rest)
    if RunDirectory(out).config.exists():
        raise RunError(f"{out} is the directory of a single run: choose another --out for a comparison")
    jobs = jobs_of(options, out)
    note_unused([config for config, _ in jobs], recipe.config(take_budget(rest)[0]))
    announce([config.check() for config, _ in jobs], out)
    options.check()
    if not options.overwrite:
        _check_existing(jobs)
    runs = [(run_title(config), config, path) for config, path in jobs]
    outcomes = options.execute(runs, overwrite=options.overwrite)
    if outcomes.results and is_main_process():
        _print_comparison(outcomes, out)
    outcomes.check()
    return 0


def parse_options(recipe: Recipe, arguments: Sequence[str]) -> tuple[CompareOptions, Path]:
    """The options that follow the recipe, and the directory of the runs."""
    options, name = parse(lambda config: CompareOptions(config=config), recipe, arguments, command="compare")
    for argument in arguments:
        if argument.split("=")[0] in ("--method", "--seed"):
            raise ConfigError(f"papa compare takes --methods and --seeds, found {argument}")
    return options, options.out or Path("runs") / f"compare-{name}"


def jobs_of(options: CompareOptions, out: Path) -> list[tuple[Config, Path]]:
    """The config and directory of each run: each method with each seed."""
    methods = split_names("--methods", options.methods, list(METHODS))
    seeds = split_numbers("--seeds", options.seeds)
    return [
        (settled(replace(options.config, method=method, seed=seed)), out / f"{method}-seed{seed}")
        for method in methods
        for seed in seeds
    ]


def _check_existing(jobs: Sequence[tuple[Config, Path]]) -> None:
    """Raise before anything is trained where an existing run has another configuration."""
    from papa.lab.launch import check_alike

    for config, path in jobs:
        try:
            check_alike(config, path)
        except RunError as error:
            raise RunError(f"{error}\nchoose another --out, or replace all runs with --overwrite") from error


def _print_comparison(outcomes: Outcomes, out: Path) -> None:
    results = list(outcomes.results.values())
    metrics = [read_run(path).events for path in outcomes.results]
    write_atomically(out / "report.html", compare_page(results, metrics))
    print_table(*compare_table(results))
    print_details(results)
    print(f"report: {out / 'report.html'}")
