"""Reproducing a table of the paper: the runs of its rows, and our numbers beside the paper's."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from papa.lab.config import Config, changed
from papa.lab.domains import TILES, load_domain
from papa.lab.recipes import find
from papa.lab.recipes.recipe import translated
from papa.lab.recipes.tables import Row, Table, number
from papa.storage import json_text


@dataclass(frozen=True, kw_only=True)
class Request:
    """The rows of a table to reproduce, and how."""

    table: Table
    rows: tuple[Row, ...]
    budget: str = "full"
    seeds: tuple[int, ...] | None = None
    """None for the seeds of each row in the paper with the full budget, otherwise for seed 1."""
    data_root: str | None = None
    """Directory of the data; None for the directories of the recipes."""

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return self.seeds or (row.seeds if self.budget == "full" else (1,))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a row."""

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
        return statistics.mean(self.ours) if self.ours else None

    @property
    def spread(self) -> float | None:
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


def config_of(row: Row, table: Table, *, budget: str = "full", seed: int = 1, data_root: str | None = None) -> Config:
    """The configuration of a row under a budget; rows that the paper quotes from elsewhere have none."""
    assert row.recipe is not None
    recipe = find(row.recipe)
    full, small = recipe.config("full"), recipe.config(budget)
    changes = {**table.options, **row.change}
    if budget != "full":
        changes = translated(changes, full, small)
    config = replace(changed(small, changes), seed=seed).settled
    if data_root is None:
        return config
    folder = Path(data_root) / config.data.name  # image folders may be in one with the name of the set
    is_inside = config.data.name in (*TILES, "imagenet") and folder.is_dir()
    return replace(config, data=replace(config.data, root=str(folder) if is_inside else data_root))


def jobs_for(request: Request, out: Path) -> list[Job]:
    """The runs of all rows; rows with the same configuration share a directory."""
    return [
        Job(row=row, config=config, path=out / "runs" / f"{_slug(config)}" / f"seed{seed}")
        for row in request.rows
        if row.recipe is not None
        for seed in request.seeds_of(row)
        for config in [config_of(row, request.table, budget=request.budget, seed=seed, data_root=request.data_root)]
    ]


def _slug(config: Config) -> str:
    """A directory name for a configuration, independent of its seed and the directory of its data."""
    value = config.to_json()
    value["seed"] = value["data"]["root"] = None
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.recipe}-{config.method}-p{config.members}-{digest}"


def check_data(jobs: Sequence[Job]) -> None:
    """Load every data set once, so that missing data is an error before anything runs."""
    for config in {json_text(job.config.to_json()["data"]): job.config for job in jobs}.values():
        load_domain(config)


def entries_of(request: Request, results: Sequence[tuple[Job, Mapping[str, Any]]]) -> list[Entry]:
    """The numbers of the table, row by row, without those that neither the paper nor our runs have."""
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
