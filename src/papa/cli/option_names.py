"""The names of options: understood by their ending, and named in messages as they are typed."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from papa.errors import ConfigError

PYTHON_NAME = re.compile(r"(?<![\w./'\"-])[a-z]+(?:_[a-z0-9]+)+(?![\w/'\"(]|\.\w)")
"""A name with underscores that is no part of a path, and no function."""
SWITCH = re.compile(r"\b([a-z]+)=True\b")


def option_names(kind: type[Any]) -> Iterator[str]:
    """The names of a dataclass's fields as options; a switch has a second one, such as `--train.no-fused`.

    Example:
        >>> from papa.lab.config import Config
        >>> [name for name in option_names(Config) if "fused" in name]
        ['--train.fused', '--train.no-fused']
    """
    return (name for name, _ in option_types(kind))


def option_types(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The names of a dataclass's fields as options, each with its type."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotations = getattr(hints[field.name], "__metadata__", ())
        given = [extra.name for extra in annotations if getattr(extra, "name", None) is not None]
        name = given[0] if given else field.name.replace("_", "-")
        plain = typing.get_args(hints[field.name])[0] if annotations else hints[field.name]
        if dataclasses.is_dataclass(plain):
            yield from option_types(typing.cast(Any, plain), f"{prefix}{name}." if name else prefix)
            continue
        yield f"--{prefix}{name}", plain
        if plain is bool:
            yield f"--{prefix}no-{name}", plain


def complete_names(arguments: Sequence[str], kind: type[Any], *, prog: str = "papa") -> list[str]:
    """The arguments with whole names of options, where an ending of one option was given.

    An option that does not exist, and a number that is none, are a `ConfigError`.

    Example:
        >>> from papa.lab.config import Config
        >>> complete_names(["--epochs=3", "--half_life", "0.01"], Config)
        ['--train.epochs=3', '--average.half-life', '0.01']
    """
    types = dict(option_types(kind))
    found: list[str] = []
    for position, argument in enumerate(arguments):
        if not argument.startswith("--"):
            found.append(argument)
            continue
        found.append(_completed(argument, list(types), prog))
        name, equals, value = found[-1].partition("=")
        following = arguments[position + 1 : position + 2]
        if not equals and following and not following[0].startswith("--"):
            equals, (value,) = "=", following
        if equals:
            _check_number(name, value, types.get(name.replace("_", "-")))
    return found


def _completed(argument: str, known: Sequence[str], prog: str) -> str:
    name, equals, value = argument.partition("=")
    wanted = name.replace("_", "-").removeprefix("--")
    if f"--{wanted}" in known or wanted in ("", "help") or wanted.startswith("tyro-"):
        return argument
    found = [option for option in known if option.endswith(f".{wanted}")]
    if len(found) == 1:
        return f"{found[0]}{equals}{value}"
    group, _, plain = wanted.removeprefix("no-").rpartition(".")
    if wanted.startswith("no-") and f"--{group}.no-{plain}" in known:
        found = [f"--{group}.no-{plain}"]
    found = found or _similar(wanted, known)
    remedy = f"did you mean {' or '.join(found)}?" if found else f"{prog} --help lists all"
    raise ConfigError(f"there is no option --{wanted}: {remedy}")


def _similar(wanted: str, known: Sequence[str]) -> list[str]:
    """Options whose last part begins so, or nearly is it, or ends so; the first of these that there are."""
    endings = {option.removeprefix("--").rpartition(".")[2]: option for option in reversed(known)}
    last = wanted.rpartition(".")[2]
    close = difflib.get_close_matches(f"--{wanted}", known, n=1, cutoff=0.85)
    begun = [option for ending, option in endings.items() if ending.startswith(last)]
    near = [endings[ending] for ending in difflib.get_close_matches(last, endings, n=1, cutoff=0.75)]
    return close or (begun if len(begun) == 1 else []) or near or [one for one in known if one.endswith(f"-{wanted}")]


def _check_number(name: str, value: str, kind: Any) -> None:
    """Raise if an option of numbers has something else; the parser's own message would be Python's."""
    kinds = set(typing.get_args(kind)) or {kind}
    if not kinds <= {int, float, type(None)} or (type(None) in kinds and value == "None"):
        return
    try:
        float(value) if float in kinds else int(value)
    except ValueError:
        expected = "a number" if float in kinds else "a whole number"
        raise ConfigError(f"{name} is {value}, expected {expected}") from None


def as_typed(message: str, names: Sequence[str]) -> str:
    """A message in which parameters of the library are named as options, where one option has that name.

    Example:
        >>> as_typed("set test_share, such as 0.2", ["--data.test-share"])
        'set --data.test-share, such as 0.2'
        >>> as_typed("or pass overwrite=True", ["--overwrite"])
        'or pass --overwrite'
    """
    message = SWITCH.sub(lambda match: f"--{match[1]}" if f"--{match[1]}" in names else match[0], message)

    def option_of(match: re.Match[str]) -> str:
        wanted = match[0].replace("_", "-")
        found = [name for name in names if name.removeprefix("--").rpartition(".")[2] == wanted]
        return found[0] if len(found) == 1 else match[0]

    return PYTHON_NAME.sub(option_of, message)
