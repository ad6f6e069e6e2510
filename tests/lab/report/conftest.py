"""Every figure is drawn here; elsewhere those of the same form are drawn once (`plot_forms`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from papa.lab.report import draw, page
from papa.lab.report.draw import Chart

DRAWN: dict[str, str] = {}


def svg(chart: Chart) -> str:
    """The drawing of an equal figure."""
    key = repr((chart.name, chart.alt, chart.caption, chart.numbers))
    if key not in DRAWN:
        DRAWN[key] = draw.svg(chart)
    return DRAWN[key]


@pytest.fixture(scope="module", autouse=True)
def _every_figure_is_drawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "svg", svg)
        yield
