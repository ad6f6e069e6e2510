"""Arguments that several commands share: the recipe first, then typed options."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

import torch
import tyro

from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config
from papa.lab.recipes import BUDGETS, RECIPES, Recipe, find

Options = TypeVar("Options", bound=Any)
SomeConfig = TypeVar("SomeConfig", bound=Config)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(Config):
    """A config as options of a command; the recipe is an argument, not an option."""

    recipe: Annotated[str, tyro.conf.Suppress] = "custom"


def take_recipe(arguments: Sequence[str], usage: str) -> tuple[Recipe, list[str]]:
    """The recipe, which is the first argument, and the remaining arguments; an error shows the usage."""
    if not arguments:
        raise ConfigError(f"a recipe is missing, known: {', '.join(RECIPES)}\n{usage}".rstrip())
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


def parse(
    make_options: Callable[[Config], Options], recipe: Recipe, arguments: Sequence[str], *, command: str
) -> tuple[Options, str]:
    """The options of a command, parsed by tyro, which exits with code 2 and a message when they are wrong.

    Returns:
        The options, and a name for the run: that of the recipe, followed by the budget if there is one.
    """
    budget, rest = take_budget(arguments)
    rest = [re.sub("^--engine(?==|$)", "--train.engine", argument) for argument in rest]
    default = make_options(_as(ConfigOptions, recipe.config(budget)))
    budgets = "; ".join(f"{name}: {meaning}" for name, meaning in BUDGETS.items())
    summary = f"{recipe.summary[0].upper()}{recipe.summary[1:]}.\n\n--budget sets the defaults ({budgets})."
    prog = f"papa {command} {recipe.name}"
    options = tyro.cli(type(default), prog=prog, description=summary, default=default, args=rest)
    options = replace(options, config=_as(Config, options.config))
    return options, f"{recipe.name}-{budget}" if budget else recipe.name


def _as(kind: type[SomeConfig], config: Config) -> SomeConfig:
    return kind(**{field.name: getattr(config, field.name) for field in fields(config)})


def split_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """A comma-separated list of known names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option} is empty, expected some of: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} has {name}: {did_you_mean(name, known)}")
    return list(dict.fromkeys(names))


def split_numbers(option: str, text: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"{option} is '{text}', expected whole numbers such as 1,2,3")
    return list(dict.fromkeys(numbers))


def use_one_thread() -> None:
    """Use one thread: more would change the bits of a result, and slow each other down on a busy machine."""
    torch.set_num_threads(1)
