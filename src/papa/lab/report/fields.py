"""Reading values from JSON that may have been edited by hand: a value of the wrong type is None."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 1e100
"""Larger numbers are no score, loss or distance, and overflow in computations."""
MAX_CHARACTERS = 500
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Control characters, surrogates, and code points that are no characters."""


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
    """A list of numbers, with None for entries that are no number; empty for anything but a list."""
    return [number(entry) for entry in value] if isinstance(value, list) else []


def part(value: Any, *keys: str) -> Any:
    """The value under nested keys, or None.

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
    """The objects in a list; empty for anything but a list."""
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """A value as one line of text, cut if it is very long."""
    line = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"


def printable(words: str) -> str:
    """Text for any file: characters that encodings or markup do not allow become replacement characters.

    Example:
        >>> printable("tab\\there, bell\\x07, surrogate\\ud800")
        'tab\\there, bell\ufffd, surrogate\ufffd'
    """
    return UNPRINTABLE.sub("\ufffd", words)


def plain(value: Any, digits: int = 4) -> str:
    """A number with few digits; empty for anything else.

    Example:
        >>> plain(0.123456), plain(120), plain(None)
        ('0.1235', '120', '')
    """
    found = number(value)
    return "" if found is None else f"{found:.{digits}g}" if found != round(found) else f"{found:.0f}"


def flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects, by their dotted names."""
    if isinstance(value, Mapping) and depth < 8:
        for key, entry in value.items():
            yield from flat(entry, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    else:
        yield prefix, value


def total_seconds(result: Mapping[str, Any]) -> float | None:
    """The time that a run took, summed over its parts."""
    seconds = result.get("seconds")
    found = [number(value) for value in seconds.values()] if isinstance(seconds, Mapping) else []
    return sum(value for value in found if value is not None) if found else None
