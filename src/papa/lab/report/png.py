"""Figures as PNG images."""

from __future__ import annotations

from typing import Any

from papa.errors import ConfigError
from papa.lab.report.figure import Figure
from papa.lab.report.svg import FONTS, standalone_svg

CURE = "pip install 'papa-torch[report]'"


def png_bytes(figure: Figure, *, zoom: float = 2.5) -> bytes:
    """A figure drawn on white, 480 points wide times `zoom`."""
    drawn: bytes = _renderer()(svg_string=standalone_svg(figure), background="#ffffff", zoom=zoom)
    return drawn


def check_png() -> None:
    """Raise a `ConfigError` where images cannot be drawn: without the package, or without a single font."""
    render = _renderer()
    with_text, without = (
        bytes(render(svg_string=f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{inside}</svg>'))
        for inside in (f'<text x="2" y="16" font-family="{FONTS}">M</text>', "")
    )
    if with_text == without:
        raise ConfigError("--png found no font to write with: install one, such as Debian's fonts-dejavu-core")


def _renderer() -> Any:
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(f"--png needs the package resvg-py, which is not installed: {CURE}") from error
    return resvg_py.svg_to_bytes
