"""Checking JSON values against type hints, so that a `TypedDict` is both the type and the schema of a file."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST = 1e100
"""Larger numbers are no score, loss, size or time, and would overflow what is computed from them."""

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
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        present = [argument for argument in arguments if argument is not type(None)]
        if value is None and len(present) < len(arguments):
            return None
        return _validated(value, present[0] if len(present) == 1 else Any, name)
    if is_typeddict(kind) and isinstance(value, dict):
        return _validated_keys(value, kind, name)
    if origin is list and isinstance(value, list):
        return [_validated(part, arguments[0], f"{name}[{index}]") for index, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _validated(part, arguments[1], _below(name, key)) for key, part in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= LARGEST:
        return value
    if isinstance(kind, type) and not is_typeddict(kind) and kind is not float and type(value) is kind:
        return value
    shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
    raise ValueError(f"{name or 'it'} is {shown}, expected {_described(kind)}")


def _validated_keys(value: dict[str, Any], kind: Any, name: str) -> dict[str, Any]:
    found = dict(value)
    for key, hint in _hints(kind).items():
        if key in value:
            found[key] = _validated(value[key], hint, _below(name, key))
        elif key in kind.__optional_keys__:
            found[key] = None
        else:
            raise ValueError(f"{_below(name, key)} is missing")
    return found


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _described(kind: Any) -> str:
    names = {float: "a number", int: "an integer", str: "text", bool: "true or false", list: "a list"}
    kind = get_origin(kind) or kind
    return names.get(kind, "an object")
