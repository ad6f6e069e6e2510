"""`papa ls`: list the recipes and the methods."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from papa.cli.tables import print_table
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import METHODS
from papa.lab.recipes import RECIPES, own
from papa.lab.recipes.recipe import PAPER

USAGE = """usage: papa ls [recipes|methods]

Lists the recipes, which are named configurations to train, in groups; `papa ls recipes` says what each trains and which
table of the paper it belongs to, `papa ls methods` how each method averages.

examples:
  papa ls
  papa ls methods
  papa show digits
"""


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case []:
            _print_groups()
        case ["recipes"]:
            rows = [(recipe.name, recipe.table, recipe.summary) for recipe in RECIPES.values()]
            print_table(("recipe", "table of the paper", "what it trains"), rows)
        case ["methods"]:
            print_table(("method", "how members are averaged"), list(METHODS.items()))
        case [other, *_]:
            raise ConfigError(f"papa ls takes nothing, recipes or methods, found {other}: {did_you_mean(other, WORDS)}")
    return 0


WORDS = ("recipes", "methods")


def _print_groups() -> None:
    """All recipes on one screen: the first groups with what they train, the others by name."""
    for group, remark in (
        (own.TRY, "seconds to a minute: papa run digits"),
        (own.YOURS, "papa run images --data.root FOLDER"),
        (PAPER, "papa reproduce lists them; --budget mini for minutes"),
        (own.STUDY, "see RESULTS.md; more: papa ls recipes, papa ls methods"),
    ):
        recipes = [recipe for recipe in RECIPES.values() if recipe.group == group]
        print(f"{group} ({remark})")
        if group in (own.TRY, own.YOURS):
            print(*(f"  {recipe.name:18} {recipe.summary}" for recipe in recipes), sep="\n")
        else:
            names = ", ".join(recipe.name for recipe in recipes)
            print(textwrap.fill(names, 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
