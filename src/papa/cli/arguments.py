"""Parsing the options of commands, and values that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

import tyro

from papa.cli.option_names import complete_names
from papa.cli.recipe_argument import take_budget
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config
from papa.lab.recipes import BUDGETS, Recipe

Options = TypeVar("Options", bound=Any)
SomeConfig = TypeVar("SomeConfig", bound=Config)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(Config):
    """A config as options of a command; the recipe is an argument, not an option."""

    recipe: Annotated[str, tyro.conf.Suppress] = "custom"


def parse_options(
    kind: type[Options], arguments: Sequence[str], *, prog: str, description: str, default: Options | None = None
) -> Options:
    """The options of a command, parsed by tyro, which exits with code 2 and a message when they are wrong.

    An option is understood by the ending of its name too, if only one option ends so: `--epochs` is `--train.epochs`.
    """
    known = complete_names(arguments, kind, prog=prog)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    options: Options = tyro.cli(kind, prog=prog, description=description, args=known, **defaults)
    return options


def parse(
    make_options: Callable[[Config], Options], recipe: Recipe, arguments: Sequence[str], *, command: str
) -> tuple[Options, str]:
    """The options of a command that has all options of a recipe.

    Returns:
        The options, and a name for the run: that of the recipe, followed by the budget if there is one.
    """
    budget, rest = take_budget(arguments)
    default = make_options(_as(ConfigOptions, recipe.config(budget)))
    budgets = "; ".join(f"{name}: {meaning}" for name, meaning in BUDGETS.items())
    summary = f"{recipe.summary[0].upper()}{recipe.summary[1:]}.\n\n--budget sets the defaults ({budgets})."
    prog = f"papa {command} {recipe.name}"
    options = parse_options(type(default), rest, prog=prog, description=summary, default=default)
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
    import torch  # last, since help and wrong options do without

    torch.set_num_threads(1)
