"""Values of results and configs as words, for pages, tables and files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_CHARACTERS = 500
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Control characters, surrogates, and code points that are no characters."""


def text(value: Any) -> str:
    """A value as one line of text, cut if it is very long."""
    line = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"


def verdict_text(result: Mapping[str, Any]) -> str:
    """Whether averaging helped, what to change, and by how much; empty for a single network."""
    found = result.get("verdict")
    if not found:
        return ""
    loss, gain = found["average_loss"], found["gain"]
    if loss is None or gain["mean"] is None or gain["error"] is None:
        return f"{found['advice']} The average soup's loss is not finite."
    side = "lower" if gain["mean"] > 0 else "higher"
    return (
        f"{found['advice']} The average soup's loss is {plain(loss)}, {plain(abs(gain['mean']), 2)} {side} than that "
        f"of one member (standard error {plain(gain['error'], 1)}, {found['num_examples']:,} validation examples)."
    )


def printable(words: str) -> str:
    """Text for any file: characters that encodings or markup do not allow become replacement characters.

    Example:
        >>> printable("tab\\there, bell\\x07, surrogate\\ud800")
        'tab\\there, bell\ufffd, surrogate\ufffd'
    """
    return UNPRINTABLE.sub("\ufffd", words)


def plain(value: float | None, digits: int = 4) -> str:
    """A number with few digits; empty for none.

    Example:
        >>> plain(0.123456), plain(120), plain(None)
        ('0.1235', '120', '')
    """
    return "" if value is None else f"{value:.{digits}g}" if value != round(value) else f"{value:.0f}"
