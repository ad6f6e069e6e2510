"""Checking JSON values against type hints, so that a `TypedDict` is both the type and the schema of a file."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST = 1e100
"""Larger numbers are no score, loss, size or time, and would overflow what is computed from them."""
DESCRIBED = {float: "a number", int: "an integer", str: "text", bool: "true or false", list: "a list"}

T = TypeVar("T")

_hints = functools.cache(get_type_hints)
"""Cached, since a file of metrics has many lines."""


def validated(value: Any, kind: type[T], *, name: str = "") -> T:
    """A JSON value as a `TypedDict`; keys that are optional and missing are None, unknown keys stay.

    Example:
        >>> from typing import TypedDict
        >>> class Point(TypedDict):
        ...     x: float
        ...     labels: list[str] | None
        >>> validated({"x": 1, "labels": ["a"]}, Point)
        {'x': 1, 'labels': ['a']}
        >>> validated({"x": "one", "labels": None}, Point)
        Traceback (most recent call last):
        ValueError: x is 'one', expected a number

    Raises:
        ValueError: names the first value of another type.
    """
    result: T = _validated(value, kind, name)
    return result


def matches(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type: a `TypedDict`, a plain type, or lists, dicts and unions of them."""
    try:
        _validated(value, kind, "")
    except ValueError:
        return False
    return True


def _validated(value: Any, kind: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    below = f"{name}." if name else ""
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        present = [argument for argument in arguments if argument is not type(None)]
        if value is None and len(present) < len(arguments):
            return None
        return _validated(value, present[0] if len(present) == 1 else Any, name)
    if is_typeddict(kind) and isinstance(value, dict):
        found = dict(value)
        for key, hint in _hints(kind).items():
            if key not in value and key not in kind.__optional_keys__:
                raise ValueError(f"{below}{key} is missing")
            found[key] = _validated(value[key], hint, f"{below}{key}") if key in value else None
        return found
    if origin is list and isinstance(value, list):
        return [_validated(part, arguments[0], f"{name}[{index}]") for index, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _validated(part, arguments[1], f"{below}{key}") for key, part in value.items()}
    if type(value) is kind if kind is not float else type(value) in (int, float) and abs(value) <= LARGEST:
        return value
    shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
    raise ValueError(f"{name or 'it'} is {shown}, expected {DESCRIBED.get(origin or kind, 'an object')}")
