"""`papa compare RECIPE`: several methods and seeds, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from papa.checkpoint import write_atomically
from papa.cli.arguments import ManyOptions, parse, speaks, split_names, split_numbers, take_recipe
from papa.cli.progress import Progress
from papa.cli.run import NEVER_AVERAGED
from papa.cli.tables import print_table
from papa.errors import ConfigError, RunError
from papa.lab.config import METHODS, Config
from papa.lab.launch import CallbackFactory, check_alike
from papa.lab.launch_many import Outcomes, execute_all
from papa.lab.recipes import Recipe
from papa.lab.report import compare_page, compare_rows, details_table, paper_rows, with_gap_closed
from papa.lab.report.reading import read_events
from papa.lab.runs import RunDirectory
from papa.process import configure_process

USAGE = """usage: papa compare RECIPE [OPTIONS]

Trains a recipe with several methods and seeds, prints them side by side and writes one report over all.
Runs that are already there are not run again; broken ones are continued.
On SIGINT (Ctrl-C) or SIGTERM the runs under way save, and it leaves with code 75: the same command goes on.
A run that fails does not stop the others; it is named at the end. Where a run is there already with other options,
nothing is trained: it could not be compared.
--budget full is the paper's setting, mini takes ten to twenty minutes a run on two CPU cores,
smoke takes seconds.

examples:
  papa compare digits
  papa compare digits --seeds 1,2,3
  papa compare digits --methods independent,papa --members 10 --out runs/ten
  papa compare optdigits-logistic --methods independent,papa-all --seeds 1,2,3 --parallel 2 --data.root ~/data
"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ManyOptions):
    """Options of `papa compare`."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    methods: str = "independent,papa,papa-all,papa-2"
    """Which methods, separated by commas."""
    seeds: str = "1"
    """Which seeds, separated by commas."""
    out: Path | None = None
    """Where the runs go, a directory for each; by default runs/compare-RECIPE[-BUDGET]."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run again what is there."""


def main(arguments: Sequence[str]) -> int:
    """Train several methods and seeds, side by side."""
    recipe, rest = take_recipe(arguments, USAGE)
    if recipe is None:
        return 0
    options, out = parse_options(recipe, rest)
    if RunDirectory(out).config.exists():
        raise RunError(f"{out} holds a run by itself: choose another --out for several")
    jobs = jobs_of(options, out)
    if not options.overwrite:
        _check_alike(jobs)
    configure_process()
    outcomes = execute_all(
        jobs,
        num_parallel=options.parallel,
        workers=options.workers,
        overwrite=options.overwrite,
        resume=not options.overwrite,
        saving=options.saving,
        make_callback=partial(_watch, display=options.parallel == 1),
    )
    if outcomes.results and speaks():
        _show(outcomes, out)
    outcomes.check()
    return 0


def _check_alike(jobs: Sequence[tuple[Config, Path]]) -> None:
    """Refuse to train anything where a run that would be taken as it is, is of another configuration."""
    for config, path in jobs:
        try:
            check_alike(config, path)
        except RunError as error:
            raise RunError(f"{error}\nchoose another --out, or run all again with --overwrite") from error


def _watch(config: Config, _: Path, *, display: bool) -> CallbackFactory:
    return partial(Progress, f"{config.recipe} {config.method} seed {config.seed}", display=display)


def _show(outcomes: Outcomes, out: Path) -> None:
    """Print the methods side by side, and write one report over all."""
    results = list(outcomes.results.values())
    metrics = [read_events(path / "metrics.jsonl") for path in outcomes.results]
    write_atomically(out / "report.html", compare_page(results, metrics))
    print_table(*with_gap_closed(results, [*compare_rows(results), *paper_rows(results)]))
    head, details = details_table(results)
    if details:
        print()
        print_table(head, details)
    for result in results:
        if result["method"] != "independent" and not result["num_averagings"]:
            print(f"{result['method']}, seed {result['seed']}: {NEVER_AVERAGED}")
    print(f"report: {out / 'report.html'}")


def parse_options(recipe: Recipe, arguments: Sequence[str]) -> tuple[CompareOptions, Path]:
    """The options after the recipe's name, and where the runs go."""
    options, name = parse(lambda config: CompareOptions(config=config), recipe, arguments, command="compare")
    for argument in arguments:
        if argument.split("=")[0] in ("--method", "--seed"):
            raise ConfigError(f"papa compare takes --methods and --seeds, found {argument}")
    return options, options.out or Path("runs") / f"compare-{name}"


def jobs_of(options: CompareOptions, out: Path) -> list[tuple[Config, Path]]:
    """Every run with its place: each method with each seed."""
    methods = split_names("--methods", options.methods, list(METHODS))
    seeds = split_numbers("--seeds", options.seeds)
    return [
        (replace(options.config, method=method, seed=seed), out / f"{method}-seed{seed}")
        for method in methods
        for seed in seeds
    ]
