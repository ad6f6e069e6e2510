"""`papa compare RECIPE`: train several methods and seeds and compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.options import (
    ParallelOptions,
    announce,
    is_main_process,
    note_unused,
    parse_recipe,
    run_title,
    split_names,
    split_numbers,
    take_budget,
    take_recipe,
    take_value,
)
from papa.cli.run import print_details
from papa.cli.tables import print_table
from papa.errors import ConfigError, RunError
from papa.lab.config import COUPLINGS, METHODS, Config
from papa.lab.recipes import Recipe
from papa.lab.report.table import compare_table
from papa.lab.runs import RunDirectory, read_run
from papa.storage import write_atomically

USAGE = """usage: papa compare RECIPE [OPTIONS]    (papa ls lists recipes and methods)
Trains a recipe with several methods and seeds, prints a table and writes one
report. The same command again continues: finished runs are not run again.

  --methods A,B,...      default independent,papa,papa-all,papa-2
  --seeds 1,2,3          default 1
  --members N            networks in each population
  --budget mini|smoke    a smaller version: some minutes, or seconds
  --data.root DIR        where the data is, or is downloaded to
  --max-train N          use fewer training examples
  --model.name NAME      the network; timm:NAME for any network of timm
  --epochs N             passes over the data
  --batch-size N         examples per step
  --train.lr X           the learning rate
  --half-life X          papa: of the distance to the mean, a share of training
  --every-epochs X       merges: epochs between them
  --parallel N           runs at the same time, each in a process of its own
  -o, --out DIR          default runs/compare-RECIPE; --overwrite replaces runs

papa compare RECIPE --help-all shows all options with their defaults.
examples: papa compare digits --seeds 1,2,3
  papa compare digits --methods independent,longer,papa --members 3 --out runs/3
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
    coupling: Annotated[dict[str, Any], tyro.conf.Suppress, tyro.conf.Fixed] = field(default_factory=dict)
    """Options of the rules of methods that were published since the paper."""


def main(arguments: Sequence[str]) -> int:
    recipe, rest = take_recipe(arguments, USAGE)
    options, out = parse_compare(recipe, rest)
    options.check()
    if RunDirectory(out).config.exists():
        raise RunError(f"{out} is the directory of a single run: choose another --out for a comparison")
    jobs = jobs_of(options, out)
    note_unused([config for config, _ in jobs], recipe.config(take_budget(rest)[0]))
    announce([config for config, _ in jobs], out)
    if not options.overwrite:
        _check_existing(jobs)
    outcomes = options.execute_all(
        [(run_title(config), config, path) for config, path in jobs], overwrite=options.overwrite
    )
    if outcomes.results and is_main_process():
        _print_comparison(outcomes.results, out)
    outcomes.check()
    return 0


def parse_compare(recipe: Recipe, arguments: Sequence[str]) -> tuple[CompareOptions, Path]:
    """The options that follow the recipe, and the directory of the runs."""
    first = split_names("--methods", take_value("--methods", arguments)[0] or CompareOptions.methods, list(METHODS))[0]
    options, coupling, name = parse_recipe(
        lambda config: CompareOptions(config=replace(config, method=first)), recipe, arguments, command="compare"
    )
    for argument in arguments:
        if argument.split("=")[0] in ("--method", "--seed"):
            raise ConfigError(f"papa compare takes --methods and --seeds, found {argument}")
    return replace(options, coupling=coupling), options.out or Path("runs") / f"compare-{name}"


def jobs_of(options: CompareOptions, out: Path) -> list[tuple[Config, Path]]:
    """The config and directory of each run: each method with each seed."""
    methods = split_names("--methods", options.methods, list(METHODS))
    seeds = split_numbers("--seeds", options.seeds)
    if options.coupling and not any(method in COUPLINGS for method in methods):
        raise ConfigError(f"--coupling.{next(iter(options.coupling))} is no option of {', '.join(methods)}")
    rules: dict[str, Any] = {method: options.coupling if method in COUPLINGS else {} for method in methods}
    return [
        (
            replace(options.config, method=method, seed=seed, coupling=rules[method]).settled,
            out / f"{method}-seed{seed}",
        )
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


def _print_comparison(outcomes: Mapping[Path, dict[str, Any]], out: Path) -> None:
    from papa.lab.report.page import compare_page  # imports scipy, which wrong options do without

    results = list(outcomes.values())
    write_atomically(out / "report.html", compare_page(results, [read_run(path).events for path in outcomes]))
    print_table(*compare_table(results))
    print_details(results)
    print(f"report: {out / 'report.html'}")
