"""Draws figures of the same form once: many tests repeat a run, and drawing takes longer than training.

The process of the tests and those that are forked for them (`fork_server`) share the drawings. Tests of drawing are in
`tests/lab/report`, and draw every figure; so do commands that tests start as new processes.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from papa.lab.report import draw, page
from papa.lab.report.draw import Chart

FOLDER = "PAPA_TEST_DRAWINGS"
"""The variable of the folder for drawings; without it nothing is shared."""


def form_of(chart: Chart) -> str:
    """What a figure is like: its words and the names of its lines, with neither numbers nor their count."""
    head, rows = chart.numbers
    kinds = sorted({re.sub(r"\d+(\.\d+)?", "0", cell) for row in rows for cell in row})
    return repr((chart.name, chart.title, [re.sub(r"\d+", "0", name) for name in head[:30]], kinds[:30], chart.height))


def svg(chart: Chart) -> str:
    """The drawing of a figure of the same form."""
    if FOLDER not in os.environ:
        return draw.svg(chart)
    file = Path(os.environ[FOLDER], hashlib.sha256(form_of(chart).encode(errors="surrogatepass")).hexdigest())
    if not file.exists():
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(draw.svg(chart))
        partial.replace(file)
    return file.read_text()


page.svg = svg
