"""Commands that run the studies, collect records, and write the pages of results from them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from papa.cli import main as papa
from papa.errors import PapaError, RunError, did_you_mean
from papa.lab.report.draw import standalone_svg
from papa.lab.runs import is_run, read_run
from papa.storage import write_atomically
from results import strength, text_pushes
from results.page import Results
from results.record import record_of, runs_of, write_records

ROOT = Path(__file__).parent.parent
FILLED = {"docs/strength.md": strength.filled, "docs/language-models.md": text_pushes.filled}
"""Pages with tables between marks, and what fills them in."""
USAGE = """usage: python -m results.make run DATA [STUDY ...]     run these studies (all); again to continue
       python -m results.make collect [RUNS]           write a record of every finished run below RUNS (runs)
       python -m results.make strength DATA            train what the tables of docs/strength.md lack
       python -m results.make text TEXT [VARIANT ...]  train what the table of docs/language-models.md lacks
       python -m results.make write                    write RESULTS.md, all tables of pages, and the figures
"""


def main(arguments: Sequence[str]) -> int:
    """Run studies, collect records, or write pages and figures."""
    match list(arguments):
        case ["run", data, *names]:
            return run(data, names, Results())
        case ["collect", *runs] if len(runs) < 2:
            return collect(Path(*runs or ["runs"]), Results())
        case ["strength", data]:
            return strength.run(Path(data))
        case ["text", path, *names]:
            return text_pushes.run(Path(path), names)
        case ["write"]:
            return write(Results())
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2


def run(data: str, names: Sequence[str], results: Results) -> int:
    """Run the commands of some studies, or of all, with data from a directory, and collect their records.

    Finished runs are not run again, and interrupted ones are continued.
    """
    for name in names:
        if name not in results.studies:
            raise RunError(f"there is no study {name}: {did_you_mean(name, list(results.studies))}")
    for command in results.commands(names):
        print(f"\n{command}", flush=True)
        words = shlex.split(command)[1:]
        if code := papa([word.replace("DATA", data, 1) if word.startswith("DATA") else word for word in words]):
            return code
    return collect(Path("runs"), results, names)


def collect(runs: Path, results: Results, names: Sequence[str] = ()) -> int:
    """Write a record of every finished run of some studies, or of all; records of other runs stay unchanged."""
    for study in names or results.studies:
        expected = {name: config for command in results.commands([study]) for name, config in runs_of(command).items()}
        found = {name: read_run(runs / name) for name in expected if is_run(runs / name)}
        written = {name: record_of(run, expected[name]) for name, run in found.items() if run.is_finished}
        if written:
            write_records(study, written, results.folder)
        if expected:
            print(f"{study}: {len(written)} of {len(expected)} runs")
    return 0


def write(results: Results) -> int:
    """Write RESULTS.md, the pages of details, tables in other pages, and the figures."""
    pages = {f"docs/results/{name}.md": results.page(name) for name in results.pages if name != "RESULTS"}
    pages["RESULTS.md"] = results.page("RESULTS")
    for name, fill in FILLED.items():
        pages[name] = fill((ROOT / name).read_text(encoding="utf-8"))
    pages["README.md"] = results.readme((ROOT / "README.md").read_text(encoding="utf-8"))
    pages |= {f"docs/assets/{name}.svg": standalone_svg(chart) for name, chart in results.pictures().items()}
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
