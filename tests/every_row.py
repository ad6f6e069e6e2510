"""Every row of every table and figure under the smoke budget: `python tests/every_row.py DATA_ROOT OUT`.

The tests run one row of each kind; this runs all, in parallel, and is not a test. Data sets that are not in DATA_ROOT
are made up. Runs that are in OUT are not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from helpers import write_images
from lab.recipes.test_smoke import write_optdigits, write_tiles
from papa.errors import DataError
from papa.lab.config import Config
from papa.lab.data.files import num_cores
from papa.lab.domains import load_domain
from papa.lab.launch import RunSpec
from papa.lab.launch_many import execute_all
from papa.lab.recipes.tables import TABLES
from papa.lab.reproduce import Request, entries_of, jobs_for


def write_folders(root: Path) -> None:
    """Images in class folders, in place of ImageNet."""
    for part in ("train", "val"):
        write_images(root / part, num_classes=3, images_per_class=6, size=120)


MADE_UP: dict[str, Callable[[Path], None]] = {
    "imagenet": write_folders,
    "vaihingen": write_tiles,
    "optdigits": lambda root: write_optdigits(root),
}


def made_up_roots(configs: Iterable[Config], place: Path) -> dict[str, str]:
    """The folders of data that is made up because it is missing, by name."""
    roots = {}
    for name, config in {config.data.name: config for config in configs}.items():
        try:
            load_domain(config)
        except DataError:
            root = place / name
            if not root.exists():
                MADE_UP[name](root)
            roots[name] = str(root)
    return roots


def main(data_root: str, out: Path) -> int:
    """Run all rows, and count those without their numbers."""
    requests = [Request(table=table, rows=table.rows, budget="smoke", data_root=data_root) for table in TABLES.values()]
    jobs = {request.table.name: jobs_for(request, out) for request in requests}
    configs = {job.path: job.config for of_table in jobs.values() for job in of_table}
    roots = made_up_roots(configs.values(), out / "made-up")
    runs = [
        RunSpec(
            config=replace(config, data=replace(config.data, root=roots.get(config.data.name, config.data.root))),
            path=path,
            resume=True,
        )
        for path, config in configs.items()
    ]
    outcomes = execute_all(runs, num_parallel=num_cores())
    num_rows = num_quoted = num_failed = 0
    for request in requests:
        found = [(job, outcomes.results[job.path]) for job in jobs[request.table.name] if job.path in outcomes.results]
        entries = entries_of(request, found)
        for row in request.rows:
            own = [entry for entry in entries if entry.row is row]
            missing = [entry.column for entry in own if not entry.ours] if row.recipe is not None else []
            if missing or not own:
                print(f"{request.table.name} {row.name}: no number for {', '.join(missing) or 'anything'}")
            num_rows, num_quoted = num_rows + 1, num_quoted + (row.recipe is None)
            num_failed += bool(missing) or not own
    print(
        f"{num_rows} rows, {num_quoted} of them quoted, {len(runs)} runs: {len(outcomes.errors)} runs failed, "
        f"{num_failed} rows without their numbers"
    )
    outcomes.check()
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
