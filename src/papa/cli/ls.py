"""`papa ls`: list the recipes."""

from __future__ import annotations

from collections.abc import Sequence

from papa.cli.tables import print_table
from papa.errors import ConfigError
from papa.lab.recipes import RECIPES

USAGE = """usage: papa ls

Lists the recipes: named configurations to train.

examples:
  papa ls
  papa show digits
  papa run digits
"""


def main(arguments: Sequence[str]) -> int:
    if arguments:
        raise ConfigError(f"papa ls takes no arguments, found {' '.join(arguments)}: see papa ls --help")
    rows = [(recipe.name, recipe.table, recipe.summary) for recipe in RECIPES.values()]
    print_table(("recipe", "table of the paper", "what it trains"), rows)
    return 0
