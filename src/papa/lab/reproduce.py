"""Reproducing a table of the paper: run what its rows need, and put our numbers beside the paper's."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from papa.checkpoint import json_text
from papa.lab.config import Config
from papa.lab.launch import CallbackFactory, Saving
from papa.lab.launch_many import Outcomes, execute_all
from papa.lab.recipes import find
from papa.lab.recipes.build import TILES, images_for
from papa.lab.recipes.change import changed, translated
from papa.lab.recipes.tables import Row, Table, number


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for."""

    table: Table
    rows: tuple[Row, ...]
    budget: str = "full"
    seeds: tuple[int, ...] | None = None
    """None for each row's own under the full budget, and 1 under others."""
    data_root: str | None = None
    """Where the data lies; None for what the recipes say."""

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        """The seeds with which a row is run."""
        return self.seeds or (row.seeds if self.budget == "full" else (1,))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run that a table needs."""

    row: Row
    config: Config
    path: Path


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One number of a table: the paper's, and ours for each seed."""

    row: Row
    column: str
    paper: float | None
    paper_spread: float | None
    ours: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Ours, over seeds; None when there is none."""
        return statistics.mean(self.ours) if self.ours else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of ours over seeds; None with fewer than two."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


def config_of(row: Row, table: Table, *, budget: str = "full", seed: int = 1, data_root: str | None = None) -> Config:
    """The configuration of a row under a budget; rows that the paper quotes have none."""
    assert row.recipe is not None
    recipe = find(row.recipe)
    full, small = recipe.config("full"), recipe.config(budget)
    changes = {**table.options, **row.change}
    if budget != "full":
        changes = translated(changes, full, small)
    config = replace(changed(small, changes), seed=seed)
    return config if data_root is None else replace(config, data=replace(config.data, root=_root_of(config, data_root)))


def _root_of(config: Config, data_root: str) -> str:
    """Where a data set lies: those that are folders may have one of their own beside other sets."""
    folder = Path(data_root) / config.data.name
    return str(folder) if config.data.name in (*TILES, "imagenet") and folder.is_dir() else data_root


def jobs_for(request: Request, out: Path) -> list[Job]:
    """Every run that the rows need, those of one configuration in one place."""
    return [
        Job(row=row, config=config, path=out / "runs" / f"{_slug(config)}" / f"seed{seed}")
        for row in request.rows
        if row.recipe is not None
        for seed in request.seeds_of(row)
        for config in [
            config_of(row, request.table, budget=request.budget, seed=seed, data_root=request.data_root).check()
        ]
    ]


def _slug(config: Config) -> str:
    """A name for a configuration, whatever its seed and wherever its data lies."""
    value = config.to_json()
    value["seed"] = value["data"]["root"] = None
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.recipe}-{config.method}-p{config.members}-{digest}"


def check_data(jobs: Sequence[Job]) -> None:
    """Load every data set once, so that a missing one shows before anything runs."""
    for config in {json_text(job.config.to_json()["data"]): job.config for job in jobs}.values():
        images_for(config)


def run(
    jobs: Sequence[Job],
    *,
    num_parallel: int = 1,
    workers: int | None = None,
    saving: Saving = Saving(),  # noqa: B008
    make_callback: Callable[[Job], CallbackFactory] | None = None,
) -> Outcomes:
    """Execute jobs, see `execute_all`; what is done is not run again, what broke goes on."""
    first = {job.path: job for job in reversed(jobs)}
    look = None if make_callback is None else lambda _, path: make_callback(first[path])
    return execute_all(
        [(job.config, job.path) for job in jobs],
        num_parallel=num_parallel,
        workers=workers,
        resume=True,
        saving=saving,
        make_callback=look,
    )


def entries_of(request: Request, results: Sequence[tuple[Job, Mapping[str, Any]]]) -> list[Entry]:
    """The table's numbers, row by row; columns for which neither the paper nor we have a number are left out."""
    entries = []
    for row in request.rows:
        runs = [result for job, result in results if job.row is row]
        for column in request.table.columns:
            ours = tuple(value for result in runs if (value := number(result, row, column)) is not None)
            paper = row.paper.get(column)
            if ours or paper is not None:
                entries.append(
                    Entry(row=row, column=column, paper=paper, paper_spread=row.spread.get(column), ours=ours)
                )
    return entries
