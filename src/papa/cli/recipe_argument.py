"""The recipe, which is the first argument of some commands, and options that decide about others; parsed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from papa.errors import ConfigError
from papa.lab.recipes import BUDGETS, Recipe, find


def take_recipe(arguments: Sequence[str], usage: str) -> tuple[Recipe, list[str]]:
    """The recipe, which is the first argument, and the remaining arguments; an error shows the usage."""
    if not arguments:
        raise ConfigError(f"a recipe is missing: `papa ls` lists all\n{usage}".rstrip())
    name, *rest = arguments
    if name.startswith("-"):
        raise ConfigError(f"the recipe comes first, found {name}\n{usage}".rstrip())
    return find(name), rest


def take_value(option: str, arguments: Sequence[str], expected: str = "") -> tuple[str | None, list[str]]:
    """The value of an option on which other options depend, such as `--budget`, and the remaining arguments."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == option:
            if not equals:
                if index + 1 >= len(rest):
                    raise ConfigError(f"{option} needs a value{expected}")
                value = rest.pop(index + 1)
            rest.pop(index)
            return value, rest
    return None, rest


def take_budget(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --budget, which sets the defaults of other options, and the remaining arguments."""
    return take_value("--budget", arguments, f", known: {', '.join(BUDGETS)}")
