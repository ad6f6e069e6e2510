"""Two commands: `collect` keeps records of runs, `write` makes `RESULTS.md` and the README's first table of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from papa.checkpoint import write_atomically
from papa.errors import PapaError
from papa.lab.report.reading import is_run, read_run
from results.page import readme_with_headline, results_page
from results.record import FOLDER, record_of, runs_of, write_record
from results.studies import STUDIES, Study

ROOT = Path(__file__).parent.parent
USAGE = """usage: python -m results.make collect [RUNS]   keep a record of every finished run below RUNS (runs)
       python -m results.make write            write RESULTS.md and the README's first table from the records
"""


def main(arguments: Sequence[str]) -> int:
    """Collect records, or write the pages."""
    match list(arguments):
        case ["collect"]:
            return collect(Path("runs"))
        case ["collect", runs]:
            return collect(Path(runs))
        case ["write"]:
            return write()
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2


def collect(runs: Path, records: Path = FOLDER, studies: Sequence[Study] = STUDIES) -> int:
    """Keep a record of every run of the studies that is finished; what is not there stays as it was.

    Args:
        runs: the directory that commands call runs.
        records: where the records go.
        studies: whose runs.
    """
    for study in studies:
        asked = {name: config for command in study.commands for name, config in runs_of(command).items()}
        num_kept = 0
        for name, config in asked.items():
            if is_run(runs / name) and (run := read_run(runs / name)).is_finished:
                write_record(name, record_of(run, config), records)
                num_kept += 1
        if asked:
            print(f"{study.name}: {num_kept} of {len(asked)} runs")
    return 0


def write() -> int:
    """Write RESULTS.md and the README's block."""
    pages = {"RESULTS.md": results_page(), "README.md": readme_with_headline((ROOT / "README.md").read_text())}
    for name, page in pages.items():
        write_atomically(ROOT / name, page)
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PapaError as error:
        print(f"results: {error}", file=sys.stderr)
        sys.exit(1)
