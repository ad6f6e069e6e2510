"""`papa reproduce TABLE`: run what a table of the paper needs, and print our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from papa.checkpoint import write_atomically
from papa.cli.arguments import ManyOptions, split_names, split_numbers
from papa.cli.progress import Progress
from papa.cli.tables import print_table
from papa.errors import ConfigError, did_you_mean
from papa.lab.launch import CallbackFactory
from papa.lab.recipes import BUDGETS
from papa.lab.recipes.tables import TABLES, Table, find_table
from papa.lab.report import table_page
from papa.lab.report.reading import read_events
from papa.lab.reproduce import Entry, Job, Request, check_data, entries_of, jobs_for, run
from papa.process import configure_process

USAGE = """usage: papa reproduce TABLE [OPTIONS]

Runs every row of a table or figure of the paper and prints the paper's numbers, ours, and the difference.
Runs that are already there are not run again; broken ones are continued. Rows of different tables that are the same
experiment share their runs, when the tables share --out.
On SIGINT (Ctrl-C) or SIGTERM the runs under way save, and it leaves with code 75: the same command goes on.
A run that fails does not stop the others; it is named at the end.

examples:
  papa reproduce
  papa reproduce table:ablation1 --budget smoke --data-root ~/data
  papa reproduce table:ablation_gradual --budget mini --rows papa,same-init --seeds 1,2,3
  papa reproduce table:logistic --seeds 1,2,3,4,5,6,7,8,9,10 --parallel 2 --data-root ~/data
"""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(ManyOptions):
    """Options of `papa reproduce`."""

    budget: str = "full"
    """full is the paper's setting, mini takes ten to twenty minutes a run on two CPU cores, smoke takes seconds."""
    seeds: str | None = None
    """Which seeds, separated by commas; None for those of each row in the paper with budget full, else for 1."""
    rows: str | None = None
    """Which rows, separated by commas; None for all."""
    out: Path | None = None
    """Where the runs go; by default runs/reproduce[-BUDGET]."""
    data_root: str | None = None
    """Where the data lies, or is downloaded to; None for what the recipes say."""


def main(arguments: Sequence[str]) -> int:
    """Reproduce a table or figure of the paper."""
    if not arguments:
        _list()
        return 0
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name.startswith("-"):
        raise ConfigError(f"papa reproduce begins with a table or figure, found {name}: `papa reproduce` lists them")
    table = find_table(name)
    options = tyro.cli(
        ReproduceOptions, prog=f"papa reproduce {table.name}", description=_description(table), args=rest
    )
    if options.budget not in BUDGETS:
        raise ConfigError(f"--budget is {options.budget}: {did_you_mean(options.budget, BUDGETS)}")
    known = [row.name for row in table.rows]
    request = Request(
        table=table,
        rows=table.pick(None if options.rows is None else split_names("--rows", options.rows, known)),
        budget=options.budget,
        seeds=None if options.seeds is None else tuple(split_numbers("--seeds", options.seeds)),
        data_root=options.data_root,
    )
    out = options.out or Path("runs") / ("reproduce" if options.budget == "full" else f"reproduce-{options.budget}")
    configure_process()
    jobs = jobs_for(request, out)
    check_data(jobs)
    outcomes = run(
        jobs,
        num_parallel=options.parallel,
        workers=options.workers,
        saving=options.saving,
        make_callback=partial(_watch, display=options.parallel == 1),
    )
    results = [(job, outcomes.results[job.path]) for job in jobs if job.path in outcomes.results]
    head = ("row", "", f"paper's{'' if options.budget == 'full' else ', full setting'}", "ours", "difference")
    rows = [_cells(entry) for entry in entries_of(request, results)]
    print_table(head, rows)
    report = out / f"{table.kind}-{table.label}.html"
    out.mkdir(parents=True, exist_ok=True)
    drawn = outcomes.results if table.kind == "figure" else {}
    page = table_page(
        f"{table.name}: {table.title}",
        _words(request),
        head,
        rows,
        _runs(jobs, out),
        list(drawn.values()),
        [read_events(path / "metrics.jsonl") for path in drawn],
    )
    write_atomically(report, page)
    print(f"runs: {out / 'runs'}\nreport: {report}")
    outcomes.check()
    return 0


def _words(request: Request) -> str:
    of_rows = {request.seeds_of(row) for row in request.rows if row.recipe is not None} or {()}
    most = max(of_rows, key=len)
    seeds = ", ".join(map(str, most)) + (", seed 1 for rows that the paper ran once" if len(of_rows) > 1 else "")
    spread = ", with the standard deviation over seeds in parentheses" if len(most) > 1 else ""
    budget = f"budget {request.budget} ({BUDGETS[request.budget]})"
    return f"Ours: {budget}, seeds {seeds}{spread}. Difference: ours less the paper's."


def _runs(jobs: Sequence[Job], out: Path) -> list[tuple[str, str]]:
    return [(f"{job.row.title}, seed {job.config.seed}", str(job.path.relative_to(out))) for job in jobs]


def _watch(job: Job, *, display: bool) -> CallbackFactory:
    return partial(Progress, f"{job.config.recipe} {job.row.name} seed {job.config.seed}", display=display)


def _list() -> None:
    rows = [(table.name, str(len(table.rows)), table.title) for table in TABLES.values()]
    print_table(("name", "rows", "what it shows"), rows)


def _description(table: Table) -> str:
    rows = "\n".join(f"  {row.name}: {row.title}" for row in table.rows)
    return f"{table.title[0].upper()}{table.title[1:]}.\n\nrows:\n{rows}"


def _cells(entry: Entry) -> tuple[str, ...]:
    difference = "" if entry.difference is None else f"{entry.difference:+.2f}"
    return (
        entry.row.title,
        entry.column.replace("_", " "),
        _number(entry.paper, entry.paper_spread),
        _number(entry.mean, entry.spread),
        difference,
    )


def _number(value: float | None, spread: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if spread is None else f"{value:.2f} ({spread:.2f})"
