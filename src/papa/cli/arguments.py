"""What the commands share: the recipe's name first, then typed options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import tyro

from papa.errors import ConfigError, did_you_mean
from papa.group import rank_of_torchrun
from papa.lab.config import Config
from papa.lab.launch import Saving
from papa.lab.recipes import BUDGETS, RECIPES, Recipe, find

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """How often a run is saved, of the commands that train."""

    checkpoint_minutes: float = 10.0
    """Save the state at the end of each epoch, and after so many minutes without that."""
    keep: int = 2
    """How many checkpoints stay."""
    checkpoint_background: bool = True
    """Train on while a copy of the state is written; without, training waits and no memory is taken for a copy."""

    @property
    def saving(self) -> Saving:
        """The same for `papa.lab.launch`."""
        return Saving(minutes=self.checkpoint_minutes, keep=self.keep, background=self.checkpoint_background)


@dataclass(frozen=True, kw_only=True)
class ManyOptions(SavingOptions):
    """How several runs are executed, of the commands that train many."""

    workers: int | None = None
    """How many processes hold the members of a run; None for as many as help."""
    parallel: int = 1
    """How many runs to train side by side, each in a process of its own, for runs too small to spread over workers."""


def take_recipe(arguments: Sequence[str], usage: str) -> tuple[Recipe | None, list[str]]:
    """The recipe named first and the rest of the arguments; None when help was asked for instead.

    Args:
        arguments: what came after the command.
        usage: what to show in place of a missing recipe.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        if arguments:
            print(usage, end="")
            return None, []
        raise ConfigError(f"a recipe is missing, known: {', '.join(RECIPES)}\n{usage}".rstrip())
    name, *rest = arguments
    if name.startswith("-"):
        raise ConfigError(f"the recipe comes first, found {name}\n{usage}".rstrip())
    return find(name), rest


def take_value(option: str, arguments: Sequence[str], expected: str = "") -> tuple[str | None, list[str]]:
    """The value of an option that decides about the others, and the rest of the arguments.

    Args:
        option: its name, such as `--budget`.
        arguments: where to look.
        expected: what to say when its value is missing.
    """
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
    """The value of --budget, which decides what the other options default to, and the rest of the arguments."""
    return take_value("--budget", arguments, f", known: {', '.join(BUDGETS)}")


def parse(
    make_options: Callable[[Config], Options], recipe: Recipe, arguments: Sequence[str], *, command: str
) -> tuple[Options, str]:
    """The options of a command, typed and checked by tyro, which exits with 2 and a message when they are wrong.

    Args:
        make_options: the options as they are by default, from a recipe's config.
        recipe: whose config they change.
        arguments: what came after the recipe.
        command: for the help.

    Returns:
        The options, and a name for what is run: the recipe's, with the budget where one was given.
    """
    budget, rest = take_budget(arguments)
    default = make_options(recipe.config(budget))
    budgets = "; ".join(f"{name}: {meaning}" for name, meaning in BUDGETS.items())
    summary = f"{recipe.summary[0].upper()}{recipe.summary[1:]}.\n\n--budget sets what options default to ({budgets})."
    prog = f"papa {command} {recipe.name}"
    options = tyro.cli(type(default), prog=prog, description=summary, default=default, args=rest)
    return options, f"{recipe.name}-{budget}" if budget else recipe.name


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
    """One thread for each process: more change the bits of a result, and stall each other on a busy machine."""
    torch.set_num_threads(1)


def speaks() -> bool:
    """Whether this process talks to people: of those that torchrun started, the first one."""
    return not rank_of_torchrun()
