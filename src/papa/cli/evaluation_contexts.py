"""What `papa soup` and `papa diff` share: parsing, and options for a network and data."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from papa.cli.options import parse_options, take_budget, take_value
from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.recipes import find

if TYPE_CHECKING:
    from papa.files import EvaluationContext


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Options for an evaluation context."""

    key: str | None = None
    """The place of the state dict in PyTorch files, such as ema or checkpoint.model; None to search the usual names."""
    factory: str | None = None
    """A function package.module:name that returns (network, batches) or (network, batches, score)."""


Options = TypeVar("Options", bound=ContextOptions)


def parse(options: type[Options], arguments: Sequence[str], *, prog: str, description: str) -> tuple[Options, Any]:
    """Parse the options of a command, and the config of the recipe it names, if any.

    Returns:
        The options, and a config or None. A recipe adds all its options, such as --data.root.
    """
    name, rest = take_value("--recipe", arguments)
    if name is None:
        shown = "\n\n--recipe NAME [--budget full|mini|smoke] adds all options of papa run NAME, such as --data.root."
        return parse_options(options, rest, prog=prog, description=description + shown), None
    budget, rest = take_budget(rest)

    unnamed = tyro.conf.arg(name="")
    config = field(default=find(name).config(budget))
    fields: list[Any] = [("own", Annotated[options, unnamed]), ("config", Annotated[Config, unnamed], config)]
    parsed: Any = parse_options(make_dataclass("Both", fields), rest, prog=prog, description=description)
    if parsed.own.factory is not None:
        raise ConfigError("--recipe and --factory both give a network and data: choose one")
    return parsed.own, parsed.config


def context_from(options: ContextOptions, config: Config | None) -> EvaluationContext | None:
    """The requested evaluation context, if any."""
    from papa.files import evaluation_context_of
    from papa.lab.loading import recipe_evaluation

    if config is not None:
        return recipe_evaluation(config)
    if options.factory is None:
        return None
    sys.path.insert(0, os.getcwd())  # so that modules of the current directory are found
    try:
        return evaluation_context_of(options.factory)
    finally:
        sys.path.remove(os.getcwd())
