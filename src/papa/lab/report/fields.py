"""Careful reading of JSON that somebody may have edited: what is not what it should be is None."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 1e100
"""Numbers beyond it belong to no score, loss or distance, and overflow what is computed from them."""
MOST_CHARACTERS = 500
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Control characters, halves of characters, and what is no character at all."""


def number(value: Any) -> float | None:
    """A finite number, or None.

    Example:
        >>> number(3), number("3"), number(float("nan")), number(True)
        (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST and not math.isnan(value) else None


def numbers(value: Any) -> list[float | None]:
    """A list of numbers, those that are none as None; anything else is an empty list."""
    return [number(entry) for entry in value] if isinstance(value, list) else []


def part(value: Any, *keys: str) -> Any:
    """What lies under `keys`, one in the other; None where there is no such thing.

    Example:
        >>> part({"test": {"mean": 91.0}}, "test", "mean")
        91.0
        >>> part({"test": None}, "test", "mean")
    """
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def entries(value: Any) -> list[Mapping[str, Any]]:
    """A list of objects, without whatever else is in it."""
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """A value as one readable line, cut where it is very long."""
    line = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 1] + "…"


def printable(words: str) -> str:
    """Words that any file can hold: what no encoding or markup allows becomes a replacement character.

    Example:
        >>> printable("tab\\there, bell\\x07, half a character\\ud800")
        'tab\\there, bell\ufffd, half a character\ufffd'
    """
    return UNPRINTABLE.sub("\ufffd", words)


def plain(value: Any, digits: int = 4) -> str:
    """A number as a reader wants it, or nothing where there is none.

    Example:
        >>> plain(0.123456), plain(120), plain(None)
        ('0.1235', '120', '')
    """
    found = number(value)
    return "" if found is None else f"{found:.{digits}g}" if found != round(found) else f"{found:.0f}"


def flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects by their dotted names."""
    if isinstance(value, Mapping) and depth < 8:
        for key, entry in value.items():
            yield from flat(entry, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    else:
        yield prefix, value
