"""JSON files: written atomically, read strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papa.errors import PapaError, RunError
from papa.storage.atomic import read_file, write_atomically
from papa.storage.errors import file_errors

CONTROL = re.compile(r"[\x7f-\x9f]|(?<!\\)(?:\\\\)*\\(?:[bfr]|u00(?:0[0-8bcdef]|1.|7f|[89].))", re.IGNORECASE)
"""Control characters in a JSON text, plain or escaped, except for line breaks and tabs."""


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON. Numbers that are not finite become null, since JSON has none."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, json_text(value, indent=2) + "\n")


def parse_json(data: bytes) -> Any:
    """Parse JSON; a `ValueError` for invalid JSON, repeated keys, numbers that are not finite, control characters."""
    text = data.decode()
    if CONTROL.search(text):
        raise ValueError("it has control characters, which could change what a terminal shows")
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=_finite_number,
            parse_float=_finite_number,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("it has a key twice")
    return value


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def read_json(path: Path, *, error: type[PapaError] = RunError) -> Any:
    """Read a JSON file, or raise an error that names it."""
    content = read_file(path, error=error)
    with file_errors(path, error=error, kind="valid JSON"):
        return parse_json(content)


def read_object(path: Path, *, error: type[PapaError] = RunError) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    value = read_json(path, error=error)
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, expected an object")
    return value
