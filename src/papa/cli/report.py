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
from papa.lab.runs import is_run, read_runs
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
    latex: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a table for a paper instead, with booktabs lines."""
    pdf: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the figures as PDF files instead, into DIR/figures."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write to this file instead, or with --pdf to this directory."""
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


def main(arguments: Sequence[str]) -> int:
    options = parse_options(ReportOptions, arguments, prog="papa report", description=DESCRIPTION)
    if not options.directories:
        raise ConfigError("a directory is missing: see papa report --help")
    chosen = [name for name in ("csv", "latex", "pdf") if getattr(options, name)]
    if len(chosen) > 1:
        raise ConfigError(f"papa report got --{' and --'.join(chosen)}: give one of them at a time")
    runs, errors = read_runs(options.directories)
    for error in errors:
        print(f"left out: {error}", file=sys.stderr)
    results, events = [run.result for run in runs], [run.events for run in runs]
    if options.pdf:
        from papa.lab.report.draw import pdf_bytes
        from papa.lab.report.figures import compare_figures, run_figures

        out = options.path("figures")
        sections = compare_figures(results, events) if options.is_comparison else run_figures(results[0], events[0])
        charts = [chart for section in sections.values() for chart in section]
        if not charts:
            raise RunError(f"{runs[0].path} has nothing to draw yet: no epoch is done")
        _write({out / f"{chart.name}.pdf": pdf_bytes(chart) for chart in charts}, options)
        print(f"wrote {len(charts)} figures to {out}")
    elif chosen:
        from papa.lab.report.export import csv_text, latex_text  # imports scipy, which help does without

        text = (csv_text if options.csv else latex_text)(runs)
        if options.out is None:
            print(text, end="")
        else:
            _write({options.out: text.encode()}, options)
            print(f"wrote {options.out}")
    else:
        from papa.lab.report.page import compare_page, run_page

        out = options.path("report.html")
        content = compare_page(results, events) if options.is_comparison else run_page(results[0], events[0])
        _write({out: content.encode()}, options)
        for run in runs:
            if not run.is_finished:
                print(f"{run.path} is not finished: the report shows the epochs that are done")
        print(f"report: {out}")
    return 0


def _write(contents: Mapping[Path, bytes], options: ReportOptions) -> None:
    """Write all files, or none if one of them exists and may not be replaced: pages that papa wrote always may."""
    from papa.lab.report.page import GENERATOR

    for path in contents:
        if path.is_dir():
            raise RunError(f"{path} is a directory, expected a file: choose another --out")
        if path.exists() and not options.overwrite:
            with file_errors(path), path.open("rb") as file:
                is_own_page = path.suffix == ".html" and GENERATOR.encode() in file.read(1024)
            if not is_own_page:
                raise RunError(f"{path} already exists: choose another --out, or replace it with --overwrite")
    for path, content in contents.items():
        with file_errors(path.parent, "make the directory"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
