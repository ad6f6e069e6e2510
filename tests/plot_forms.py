"""Draws plots of the same form once: many tests repeat a run, and drawing takes longer than training.

The process of the tests and those that are forked for them (`fork_server`) share the drawings. Tests of drawing are in
`tests/lab/report`, and draw every plot; so do commands that tests start as new processes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from papa.lab.report import draw, page
from papa.lab.report.plot import AnyPlot

FOLDER = "PAPA_TEST_DRAWINGS"
"""The variable of the folder for drawings; without it nothing is shared."""


def form_of(value: Any) -> str:
    """What a value is like: words without their numbers, signs and magnitudes of numbers, what is in a sequence."""
    if isinstance(value, str):
        return repr(re.sub(r"\d+([.,:]\d+)*", "0", value))
    if isinstance(value, float | int) and not isinstance(value, bool):
        return _form_of_number(value)
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(form_of(getattr(value, field.name)) for field in fields(value))})"
    if isinstance(value, Mapping):
        return form_of(list(value.items()))
    if isinstance(value, Sequence):
        return f"{min(len(value), 3)} of {sorted(set(map(form_of, value)))}"
    return repr(value)


def _form_of_number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return repr(float(value))
    magnitude = next((bound for bound in (1e-30, 1e-3, 1e6, 1e30) if abs(value) < bound), math.inf)
    return f"{'-' if value < 0 else ''}<{magnitude}"


def svg(plot: AnyPlot) -> str:
    """The drawing of a plot of the same form."""
    if FOLDER not in os.environ:
        return draw.svg(plot)
    file = Path(os.environ[FOLDER], hashlib.sha256(form_of(plot).encode(errors="surrogatepass")).hexdigest())
    if not file.exists():
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(draw.svg(plot))
        partial.replace(file)
    return file.read_text()


page.svg = svg
