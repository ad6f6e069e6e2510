"""Commands that run the studies, collect records, and write the pages of results from them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from papa.cli import main as papa
from papa.errors import PapaError, RunError, did_you_mean
from papa.lab.report.draw import Chart, standalone_svg
from papa.lab.runs import is_run, read_run
from papa.storage import write_atomically
from results.page import detail_page, headline_plot, readme_with_headline, results_page
from results.record import FOLDER, read_records, record_of, runs_of, write_records
from results.studies import PAGES, PICTURES, STUDIES
from results.study import Study

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs/assets"
PICTURE = ASSETS / "members-to-soup.svg"
USAGE = """usage: python -m results.make collect [RUNS]   write a record of every finished run below RUNS (runs)
       python -m results.make run DATA [STUDY ...]   run all commands of these studies (all); the same again continues
       python -m results.make write            write RESULTS.md, docs/results/, the README's first table and its figure
       python -m results.make pictures         write only the figures in docs/assets/
"""


def main(arguments: Sequence[str]) -> int:
    """Collect records, or write pages and figure."""
    match list(arguments):
        case ["collect"]:
            return collect(Path("runs"))
        case ["collect", runs]:
            return collect(Path(runs))
        case ["run", data, *names]:
            return run(data, names)
        case ["write"]:
            return write()
        case ["pictures"]:
            return write_pictures()
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2


def run(data: str, names: Sequence[str], studies: Sequence[Study] = STUDIES) -> int:
    """Run the commands of some studies, or of all, with data from a directory, and collect their records.

    Finished runs are not run again, and interrupted ones are continued.
    """
    known = [study.name for study in studies]
    for name in names:
        if name not in known:
            raise RunError(f"there is no study {name}: {did_you_mean(name, known)}")
    for study in studies:
        for command in study.commands if not names or study.name in names else ():
            print(f"\n{command}", flush=True)
            words = shlex.split(command)[1:]
            if code := papa([word.replace("DATA", data, 1) if word.startswith("DATA") else word for word in words]):
                return code
    return collect(Path("runs"), studies=[study for study in studies if not names or study.name in names])


def collect(runs: Path, records: Path = FOLDER, studies: Sequence[Study] = STUDIES) -> int:
    """Write a record of every finished run of the studies; records of other runs stay unchanged."""
    for study in studies:
        expected = {name: config for command in study.commands for name, config in runs_of(command).items()}
        found = {name: read_run(runs / name) for name in expected if is_run(runs / name)}
        written = {name: record_of(run, expected[name]) for name, run in found.items() if run.is_finished}
        if written:
            write_records(study.name, written, records)
        if expected:
            print(f"{study.name}: {len(written)} of {len(expected)} runs")
    return 0


def write() -> int:
    """Write RESULTS.md, the pages of details, the README's block and the figures."""
    pages = {"RESULTS.md": results_page(), "README.md": readme_with_headline((ROOT / "README.md").read_text())}
    pages |= {f"docs/results/{name}.md": detail_page(name) for name in PAGES}
    for name, page in pages.items():
        write_atomically(ROOT / name, page)
        print(f"wrote {name}")
    return write_pictures()


def write_pictures() -> int:
    """Write the README's figure, and those of studies that were run."""
    charts: dict[Path, Chart] = {PICTURE: headline_plot()}
    for name, (table, draw) in PICTURES.items():
        if records := read_records(table.all_commands):
            charts[ASSETS / f"{name}.svg"] = draw(list(records.values()))
    ASSETS.mkdir(parents=True, exist_ok=True)
    for path, chart in charts.items():
        write_atomically(path, standalone_svg(chart))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PapaError as error:
        print(f"results: {error}", file=sys.stderr)
        sys.exit(1)
