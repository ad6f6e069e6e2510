"""`papa show RECIPE`: print the configuration of a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from papa.cli.options import take_budget, take_recipe
from papa.errors import ConfigError
from papa.storage import json_text

USAGE = """usage: papa show RECIPE [--budget full|mini|smoke]

Prints the configuration of a recipe as JSON. Each entry is an option of `papa run RECIPE`, such as --train.epochs.

examples:
  papa show digits
  papa show cifar100-resnet18 --budget mini
"""


def main(arguments: Sequence[str]) -> int:
    recipe, rest = take_recipe(arguments, USAGE)
    budget, rest = take_budget(rest)
    if rest:
        raise ConfigError(f"papa show takes a recipe and a budget, found {' '.join(rest)}")
    print(json_text(recipe.config(budget).to_json(), indent=2))
    return 0
