"""`papa report DIR ...`: the page, table or figures of existing runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.cli.options import parse_options
from papa.errors import ConfigError, RunError
from papa.lab.runs import Run, is_run, read_runs
from papa.storage import file_errors, write_atomically

DESCRIPTION = """Writes report.html into DIR: the page of one run, or the comparison of all runs in a directory.

Several directories are compared too; --out then says where the page goes. Pages that papa wrote are replaced, other
files only with --overwrite. The report of an unfinished run shows the epochs that are done.
Pages and figures need jinja2 and matplotlib: pip install 'papa-torch[report]'

examples:
  papa report runs/digits-papa-seed1
  papa report runs/compare-digits --latex
  papa report runs/digits-papa-seed1 runs/digits-papa-all-seed1 --out both.html
  papa report runs/compare-digits --pdf --out figures"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `papa report`."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")]
    """Runs, or directories that contain runs."""
    csv: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the scores instead, one line per run and data set."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print results, epochs and the means over seeds instead."""
    latex: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a table for a paper instead, with booktabs lines."""
    png: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the figures as images instead, into DIR/figures."""
    pdf: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the figures as PDF files instead, into DIR/figures."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write to this file instead, or with --png and --pdf to this directory."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace existing files."""

    @property
    def is_comparison(self) -> bool:
        return len(self.directories) > 1 or not is_run(self.directories[0])

    def path(self, name: str) -> Path:
        """Where to write: `out`, or this name in the only directory."""
        if self.out is None and len(self.directories) > 1:
            raise ConfigError(f"papa report got {len(self.directories)} directories: choose a file with --out")
        return self.out or self.directories[0] / name


FORMATS = ("csv", "json", "latex", "png", "pdf")


def main(arguments: Sequence[str]) -> int:
    options = parse_options(ReportOptions, arguments, prog="papa report", description=DESCRIPTION)
    if not options.directories:
        raise ConfigError("a directory is missing: see papa report --help")
    chosen = [name for name in FORMATS if getattr(options, name)]
    if len(chosen) > 1:
        raise ConfigError(f"papa report got --{' and --'.join(chosen)}: give one of them at a time")
    runs, errors = read_runs(options.directories)
    for error in errors:
        print(f"left out: {error}", file=sys.stderr)
    if not chosen:
        _write_page(runs, options)
    elif chosen[0] in ("png", "pdf"):
        _write_figures(runs, options, chosen[0])
    else:
        from papa.lab.report.export import csv_text, json_report, latex_text  # imports scipy, which help does without

        text = {"csv": csv_text, "json": json_report, "latex": latex_text}[chosen[0]](runs)
        if options.out is None:
            print(text, end="")
        else:
            _write({options.out: text.encode()}, options)
            print(f"wrote {options.out}")
    return 0


def _write_page(runs: Sequence[Run], options: ReportOptions) -> None:
    from papa.lab.report.page import compare_page, run_page

    out = options.path("report.html")
    if options.is_comparison:
        content = compare_page([run.result for run in runs], [run.events for run in runs])
    else:
        content = run_page(runs[0].result, runs[0].events)
    _write({out: content.encode()}, options)
    for run in runs:
        if not run.is_finished:
            print(f"{run.path} is not finished: the report shows the epochs that are done")
    print(f"report: {out}")


def _write_figures(runs: Sequence[Run], options: ReportOptions, ending: str) -> None:
    from papa.lab.report.draw import RENDERERS
    from papa.lab.report.figures import compare_figures, run_figures

    out = options.path("figures")
    if options.is_comparison:
        sections = compare_figures([run.result for run in runs], [run.events for run in runs])
    else:
        sections = run_figures(runs[0].result, runs[0].events)
    charts = [chart for section in sections.values() for chart in section]
    if not charts:
        raise RunError(f"{runs[0].path} has nothing to draw yet: no epoch is done")
    _write({out / f"{chart.name}.{ending}": RENDERERS[ending](chart) for chart in charts}, options)
    print(f"wrote {len(charts)} figures to {out}")


def _write(contents: Mapping[Path, bytes], options: ReportOptions) -> None:
    """Write all files, or none if one of them exists and may not be replaced."""
    for path in contents:
        if path.is_dir():
            raise RunError(f"{path} is a directory, expected a file: choose another --out")
        if path.exists() and not options.overwrite and not _is_own_page(path):
            raise RunError(f"{path} already exists: choose another --out, or replace it with --overwrite")
    for path, content in contents.items():
        with file_errors(path.parent, "make the directory"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _is_own_page(path: Path) -> bool:
    from papa.lab.report.page import GENERATOR

    with file_errors(path), path.open("rb") as file:
        return path.suffix == ".html" and GENERATOR.encode() in file.read(1024)
