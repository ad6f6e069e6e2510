"""`papa ls`: the recipes."""

from __future__ import annotations

from collections.abc import Sequence

from papa.cli.tables import print_table
from papa.errors import ConfigError
from papa.lab.recipes import RECIPES


def main(arguments: Sequence[str]) -> int:
    """List the recipes."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: papa ls\n\nLists the recipes. `papa show RECIPE` shows one, `papa run RECIPE` runs it.")
        return 0
    if arguments:
        raise ConfigError(f"papa ls takes no arguments, found {' '.join(arguments)}: see papa ls --help")
    rows = [(recipe.name, recipe.table, recipe.summary) for recipe in RECIPES.values()]
    print_table(("recipe", "table of the paper", "what it trains"), rows)
    return 0
