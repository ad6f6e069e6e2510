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


def option_names(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The names of a dataclass's fields as options; a switch has a second one, such as `--train.no-fused`.

    Example:
        >>> from papa.lab.config import Config
        >>> [name for name in option_names(Config) if "fused" in name]
        ['--train.fused', '--train.no-fused']
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotations = getattr(hints[field.name], "__metadata__", ())
        given = [extra.name for extra in annotations if getattr(extra, "name", None) is not None]
        name = given[0] if given else field.name.replace("_", "-")
        plain = typing.get_args(hints[field.name])[0] if annotations else hints[field.name]
        if dataclasses.is_dataclass(plain):
            yield from option_names(typing.cast(Any, plain), f"{prefix}{name}." if name else prefix)
            continue
        yield f"--{prefix}{name}"
        if plain is bool:
            yield f"--{prefix}no-{name}"


def complete_names(arguments: Sequence[str], kind: type[Any]) -> list[str]:
    """The arguments with whole names of options, where an ending of one option was given.

    Example:
        >>> from papa.lab.config import Config
        >>> complete_names(["--epochs=3", "--half_life", "0.01"], Config)
        ['--train.epochs=3', '--average.half-life', '0.01']
    """
    known = list(option_names(kind))
    return [_completed(argument, known) if argument.startswith("--") else argument for argument in arguments]


def _completed(argument: str, known: Sequence[str]) -> str:
    name, equals, value = argument.partition("=")
    wanted = name.replace("_", "-").removeprefix("--")
    if f"--{wanted}" in known or wanted in ("", "help"):
        return argument
    found = [option for option in known if option.endswith(f".{wanted}")]
    if len(found) == 1:
        return f"{found[0]}{equals}{value}"
    found = found or [option for option in known if option.endswith(f"-{wanted}")]
    endings = {option.removeprefix("--").rpartition(".")[2]: option for option in reversed(known)}
    found = found or [endings[ending] for ending in difflib.get_close_matches(wanted, endings, n=1, cutoff=0.75)]
    if found:
        raise ConfigError(f"there is no option --{wanted}: did you mean {' or '.join(found)}?")
    return argument


def as_typed(message: str, names: Sequence[str]) -> str:
    """A message in which parameters of the library are named as options, where one option has that name.

    Example:
        >>> as_typed("set test_share, such as 0.2", ["--data.test-share"])
        'set --data.test-share, such as 0.2'
    """

    def option_of(match: re.Match[str]) -> str:
        wanted = match[0].replace("_", "-")
        found = [name for name in names if name.removeprefix("--").rpartition(".")[2] == wanted]
        return found[0] if len(found) == 1 else match[0]

    return PYTHON_NAME.sub(option_of, message)
