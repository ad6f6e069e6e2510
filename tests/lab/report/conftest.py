"""Every plot is drawn here; elsewhere those of the same form are drawn once (`plot_forms`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from papa.lab.report import draw, page
from papa.lab.report.plot import AnyPlot

DRAWN: dict[str, str] = {}


def svg(plot: AnyPlot) -> str:
    """The drawing of an equal plot."""
    key = repr(plot)
    if key not in DRAWN:
        DRAWN[key] = draw.svg(plot)
    return DRAWN[key]


@pytest.fixture(scope="module", autouse=True)
def _every_plot_is_drawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "svg", svg)
        yield
