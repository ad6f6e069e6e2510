"""`papa report DIR ...`: the page, table or figures of existing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.errors import ConfigError, RunError
from papa.lab.report import compare_page, run_page
from papa.lab.report.draw import RENDERERS
from papa.lab.report.export import csv_text, json_report, latex_text
from papa.lab.report.figures import compare_figures, run_figures
from papa.lab.report.page import GENERATOR
from papa.lab.report.reading import Run, is_run, read_runs
from papa.storage import write_atomically

USAGE = """usage: papa report DIR [DIR ...] [--csv | --json | --latex | --png | --pdf] [--out PATH] [--overwrite]

Writes report.html into DIR: the page of one run, or the comparison of all runs in a directory.
Several directories are compared too; --out then says where the page goes.

  --csv        print the scores instead, one line per run and data set
  --json       print results, epochs and the means over seeds instead
  --latex      print a table for a paper instead, with booktabs lines
  --png        write the figures as images instead, into DIR/figures
  --pdf        write the figures as PDF files instead, into DIR/figures
  --out PATH   write to PATH instead: a file, or with --png and --pdf a directory
  --overwrite  replace existing files; pages that papa wrote are replaced in any case

The report of an unfinished run shows the epochs that are done.
Pages and figures need jinja2 and matplotlib: pip install 'papa-torch[report]'

examples:
  papa report runs/digits-papa-seed1
  papa report runs/compare-digits --latex
  papa report runs/digits-papa-seed1 runs/digits-papa-all-seed1 --out both.html
  papa report runs/compare-digits --pdf --out figures
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `papa report`."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Runs, or directories that contain runs."""
    csv: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the scores, one line per run and data set."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print results, epochs and the means over seeds."""
    latex: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a table for a paper."""
    png: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the figures as images."""
    pdf: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the figures as PDF files."""
    out: Path | None = None
    """Write to this file, or with --png and --pdf to this directory."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace existing files."""


def main(arguments: Sequence[str]) -> int:
    """Report on runs."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    options = parse_options(arguments)
    runs = read_runs(options.directories)
    formats = [name for name in (*TEXTS, *RENDERERS) if getattr(options, name)]
    if len(formats) > 1:
        raise ConfigError(f"papa report got --{' and --'.join(formats)}: give one of them at a time")
    try:
        if not formats:
            _write_page(runs, options)
        elif formats[0] in RENDERERS:
            _write_figures(runs, options, formats[0])
        else:
            _write_text(TEXTS[formats[0]](runs), options)
    except RecursionError as error:
        raise RunError("a result.json is nested too deeply to be a file of papa") from error
    return 0


def parse_options(arguments: Sequence[str]) -> ReportOptions:
    """The options, checked by tyro, which exits with 2 and a message when they are wrong."""
    if not any(not argument.startswith("-") for argument in arguments):
        raise ConfigError(f"a directory is missing\n{USAGE}".rstrip())
    return tyro.cli(ReportOptions, prog="papa report", args=list(arguments))


TEXTS: Mapping[str, Callable[[Sequence[Run]], str]] = {"csv": csv_text, "json": json_report, "latex": latex_text}


def _write_text(content: str, options: ReportOptions) -> None:
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
            print(f"{run.path} is not finished: the report shows the epochs that are done")
    print(f"report: {out}")


def _write_figures(runs: Sequence[Run], options: ReportOptions, ending: str) -> None:
    out = options.out or _only_directory(options) / "figures"
    if _is_comparison(options):
        sections = compare_figures([run.result for run in runs], [run.events for run in runs])
    else:
        sections = run_figures(runs[0].result, runs[0].events)
    plots = [plot for section in sections.values() for plot in section]
    if not plots:
        raise RunError(f"{runs[0].path} has nothing to draw yet: no epoch is done")
    _write({out / f"{plot.name}.{ending}": RENDERERS[ending](plot) for plot in plots}, options)
    print(f"wrote {len(plots)} figures to {out}")


def _is_comparison(options: ReportOptions) -> bool:
    return len(options.directories) > 1 or not is_run(options.directories[0])


def _only_directory(options: ReportOptions) -> Path:
    if len(options.directories) > 1:
        raise ConfigError(f"papa report got {len(options.directories)} directories: choose a file with --out")
    return options.directories[0]


def _write(contents: Mapping[Path, bytes], options: ReportOptions) -> None:
    """Write all files, or none if one of them exists and may not be replaced."""
    for path in contents:
        if path.is_dir():
            raise RunError(f"{path} is a directory, expected a file: choose another --out")
        if path.exists() and not options.overwrite and not _is_own_page(path):
            raise RunError(f"{path} already exists: choose another --out, or replace it with --overwrite")
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
