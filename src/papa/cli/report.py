"""`papa report DIR ...`: the page, table or images of runs that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.checkpoint import write_atomically
from papa.errors import ConfigError, RunError
from papa.lab.report import compare_page, run_page
from papa.lab.report.export import csv_text, json_report, latex_text
from papa.lab.report.figure import Figure
from papa.lab.report.figures import compare_figures, run_figures
from papa.lab.report.markup import GENERATOR
from papa.lab.report.png import check_png, png_bytes
from papa.lab.report.reading import Run, is_run, read_runs

USAGE = """usage: papa report DIR [DIR ...] [--csv | --json | --latex | --png] [--out PATH] [--overwrite]

Writes report.html anew, into DIR: of one run, or of all the runs a directory holds, side by side.
Several directories are put side by side too; --out then says where the page goes.

  --csv        print the scores instead, one line for each run and set of data
  --json       print results, epochs and the means over seeds instead
  --latex      print a table for a paper instead, with the lines of booktabs
  --png        write the figures as images instead, into DIR/figures
  --out PATH   write there instead: a file, or with --png a directory
  --overwrite  replace files that are there; pages that papa wrote are replaced anyway

A run that has not finished is reported as far as it came.

examples:
  papa report runs/digits-papa-seed1
  papa report runs/compare-digits --latex
  papa report runs/digits-papa-seed1 runs/digits-papa-all-seed1 --out both.html
  papa report runs/compare-digits --png --out figures
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `papa report`."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Runs, or directories that hold runs."""
    csv: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the scores, one line for each run and set of data."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print results, epochs and the means over seeds."""
    latex: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a table for a paper."""
    png: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the figures as images."""
    out: Path | None = None
    """Write there: a file, or with --png a directory."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace files that are there."""


def main(arguments: Sequence[str]) -> int:
    """Report on runs that are there."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    options = parse_options(arguments)
    runs = read_runs(options.directories)
    asked = [name for name in ("csv", "json", "latex", "png") if getattr(options, name)]
    if len(asked) > 1:
        raise ConfigError(f"papa report got --{' and --'.join(asked)}: give one of them at a time")
    try:
        if options.png:
            _write_images(runs, options)
        elif asked:
            _give_text(TEXTS[asked[0]](runs), options)
        else:
            _write_page(runs, options)
    except RecursionError as error:
        raise RunError("a result.json is nested too deeply to be a file of papa") from error
    return 0


def parse_options(arguments: Sequence[str]) -> ReportOptions:
    """The options, checked by tyro, which exits with 2 and a message when they are wrong."""
    if not any(not argument.startswith("-") for argument in arguments):
        raise ConfigError(f"a directory is missing\n{USAGE}".rstrip())
    return tyro.cli(ReportOptions, prog="papa report", args=list(arguments))


TEXTS: Mapping[str, Callable[[Sequence[Run]], str]] = {"csv": csv_text, "json": json_report, "latex": latex_text}


def _give_text(content: str, options: ReportOptions) -> None:
    if options.out is None:
        print(content, end="")
    else:
        _write({options.out: content.encode()}, options)
        print(f"wrote {options.out}")


def _write_page(runs: Sequence[Run], options: ReportOptions) -> None:
    out = options.out or _only_directory(options) / "report.html"
    if _is_comparison(options):
        content = compare_page([run.result for run in runs], [run.events for run in runs])
    else:
        content = run_page(runs[0].result, runs[0].events)
    _write({out: content.encode()}, options)
    for run in runs:
        if not run.is_finished:
            print(f"{run.path} has not finished: reported as far as it came")
    print(f"report: {out}")


def _write_images(runs: Sequence[Run], options: ReportOptions) -> None:
    check_png()
    out = options.out or _only_directory(options) / "figures"
    if _is_comparison(options):
        sections = compare_figures([run.result for run in runs], [run.events for run in runs])
    else:
        sections = run_figures(runs[0].result, runs[0].events)
    figures: list[Figure] = [figure for section in sections.values() for figure in section]
    if not figures:
        raise RunError(f"{runs[0].path} has nothing to draw yet: no epoch is done")
    _write({out / f"{figure.name}.png": png_bytes(figure) for figure in figures}, options)
    print(f"wrote {len(figures)} figures to {out}")


def _is_comparison(options: ReportOptions) -> bool:
    return len(options.directories) > 1 or not is_run(options.directories[0])


def _only_directory(options: ReportOptions) -> Path:
    if len(options.directories) > 1:
        raise ConfigError(f"papa report got {len(options.directories)} directories: say with --out where it goes")
    return options.directories[0]


def _write(contents: Mapping[Path, bytes], options: ReportOptions) -> None:
    """Write all files, or none where one is there that is not papa's to replace."""
    for path in contents:
        if path.is_dir():
            raise RunError(f"{path} is a directory, expected a file: choose another --out")
        if path.exists() and not options.overwrite and not _is_own_page(path):
            raise RunError(f"{path} is there already: choose another --out, or replace it with --overwrite")
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the directory {path.parent}: {error.strerror or error}") from error
        write_atomically(path, content)


def _is_own_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.suffix == ".html" and GENERATOR.encode() in file.read(1024)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
