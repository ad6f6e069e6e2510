"""`papa reproduce TABLE`: run a table or figure of the paper, and print our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from papa.cli.options import ParallelOptions, announce, parse_options, split_names, split_numbers
from papa.cli.tables import print_table
from papa.errors import ConfigError, did_you_mean
from papa.lab.recipes import BUDGETS
from papa.lab.recipes.tables import TABLES, Table, find_table
from papa.lab.runs import read_run
from papa.storage import write_atomically

if TYPE_CHECKING:
    from papa.lab.launch_many import Outcomes
    from papa.lab.reproduce import Entry, Job, Request

USAGE = """usage: papa reproduce TABLE [OPTIONS]

Runs all rows of a table or figure of the paper and prints the paper's numbers, ours, and the difference.
Without a table it lists them; `papa reproduce TABLE --help` lists the rows and options.
Finished runs are not run again; stopped ones are resumed. Tables with the same --out share runs of the same config.
On SIGINT (Ctrl-C) or SIGTERM the active runs save, and it exits with code 75: the same command continues.
A run that fails does not stop the others; it is named at the end.

examples:
  papa reproduce
  papa reproduce table:ablation1 --budget smoke --data.root ~/data
  papa reproduce table:ablation_gradual --budget mini --rows papa,same-init --seeds 1,2,3
  papa reproduce table:logistic --seeds 1,2,3,4,5,6,7,8,9,10 --parallel 2 --data.root ~/data
"""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(ParallelOptions):
    """Options of `papa reproduce`."""

    budget: str = "full"
    """full is the paper's setting, mini takes ten to twenty minutes a run on two CPU cores, smoke takes seconds."""
    seeds: str | None = None
    """Seeds, separated by commas; None for those of the paper with --budget full, otherwise seed 1."""
    rows: str | None = None
    """Rows, separated by commas; None for all."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Directory of the runs; by default runs/reproduce[-BUDGET]."""
    data_root: Annotated[str | None, tyro.conf.arg(name="data.root")] = None
    """Directory of the data, where it is also downloaded to; None for the directories of the recipes."""


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        rows = [(table.name, str(len(table.rows)), table.title) for table in TABLES.values()]
        print_table(("name", "rows", "what it shows"), rows)
        return 0
    name, *rest = arguments
    if name.startswith("-"):
        raise ConfigError(f"papa reproduce begins with a table or figure, found {name}: `papa reproduce` lists them")
    table = find_table(name)
    options = parse_options(
        ReproduceOptions, rest, prog=f"papa reproduce {table.name}", description=_description(table)
    )
    options.check()
    from papa.lab.reproduce import check_data, jobs_for  # imports torch, which help does without

    request = _request(options, table)
    out = options.out or Path("runs") / ("reproduce" if options.budget == "full" else f"reproduce-{options.budget}")
    jobs = jobs_for(request, out)
    check_data(jobs)
    announce([job.config for job in jobs], out)
    outcomes = options.execute_all(
        [(f"{job.config.recipe} {job.row.name} seed {job.config.seed}", job.config, job.path) for job in jobs]
    )
    _print_table(request, jobs, outcomes, out)
    outcomes.check()
    return 0


def _request(options: ReproduceOptions, table: Table) -> Request:
    from papa.lab.reproduce import Request

    if options.budget not in BUDGETS:
        raise ConfigError(f"--budget is {options.budget}: {did_you_mean(options.budget, BUDGETS)}")
    names = [row.name for row in table.rows]
    return Request(
        table=table,
        rows=table.pick(None if options.rows is None else split_names("--rows", options.rows, names)),
        budget=options.budget,
        seeds=None if options.seeds is None else tuple(split_numbers("--seeds", options.seeds)),
        data_root=options.data_root,
    )


def _print_table(request: Request, jobs: Sequence[Job], outcomes: Outcomes, out: Path) -> None:
    """Print the table and write its page."""
    from papa.lab.report.page import table_page
    from papa.lab.reproduce import entries_of

    table, is_full = request.table, request.budget == "full"
    results = [(job, outcomes.results[job.path]) for job in jobs if job.path in outcomes.results]
    head = ("row", "", "paper's" if is_full else "paper's, full setting", "ours", "difference")
    rows = [_cells(entry) for entry in entries_of(request, results)]
    print_table(head, rows)
    seeds_of_rows = {request.seeds_of(row) for row in request.rows if row.recipe is not None} or {()}
    seeds = max(seeds_of_rows, key=len)
    single = ", seed 1 for rows that the paper ran once" if len(seeds_of_rows) > 1 else ""
    deviation = ", with the standard deviation over seeds in parentheses" if len(seeds) > 1 else ""
    with_curves = outcomes.results if table.kind == "figure" else {}
    page = table_page(
        f"{table.name}: {table.title}",
        f"Ours: budget {request.budget} ({BUDGETS[request.budget]}), seeds {', '.join(map(str, seeds))}{single}"
        f"{deviation}. "
        "Difference: ours minus the paper's.",
        head,
        rows,
        [(f"{job.row.title}, seed {job.config.seed}", str(job.path.relative_to(out))) for job in jobs],
        list(with_curves.values()),
        [read_run(path).events for path in with_curves],
    )
    out.mkdir(parents=True, exist_ok=True)
    report = out / f"{table.kind}-{table.label}.html"
    write_atomically(report, page)
    print(f"runs: {out / 'runs'}\nreport: {report}")


def _description(table: Table) -> str:
    rows = "\n".join(f"  {row.name}: {row.title}" for row in table.rows)
    return f"{table.title[0].upper()}{table.title[1:]}.\n\nrows:\n{rows}"


def _cells(entry: Entry) -> tuple[str, ...]:
    difference = "" if entry.difference is None else f"{entry.difference:+.2f}"
    numbers = _number(entry.paper, entry.paper_spread), _number(entry.mean, entry.spread)
    return (entry.row.title, entry.column.replace("_", " "), *numbers, difference)


def _number(value: float | None, deviation: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ({deviation:.2f})"
