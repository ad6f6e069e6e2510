"""Recipes: named configurations to train, those of the paper with its numbers."""

from __future__ import annotations

import difflib

from papa.errors import ConfigError
from papa.lab.config import Config, changed
from papa.lab.recipes import own, paper
from papa.lab.recipes.recipe import BUDGETS, Recipe
from papa.lab.recipes.tables import Row, find_table

__all__ = ["BUDGETS", "RECIPES", "Recipe", "find", "paper_details", "paper_scores", "paper_soups"]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*own.RECIPES, *paper.RECIPES)}


def find(name: str) -> Recipe:
    """A recipe by its name, or a `ConfigError` with the closest matches."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"there is no recipe {name}: {hint}`papa ls` lists all {len(RECIPES)}")
    return RECIPES[name]


SCORES = ("mean", "min", "max", "ensemble", "average_soup", "greedy_soup")


def paper_scores(config: Config) -> dict[str, float] | None:
    """The paper's scores for a recipe's method, grid and population size in its full setting, as in `result.json`."""
    row = _paper_row(config)
    if row is None:
        return None
    averages = {kind: details["average F1"] for kind, details in (paper_details(config) or {}).items()}
    return averages | {column: value for column, value in row.paper.items() if column in SCORES} or None


def paper_details(config: Config) -> dict[str, dict[str, float]] | None:
    """The paper's details of these scores, such as the score of each class."""
    row = _paper_row(config)
    details: dict[str, dict[str, float]] = {}
    for column, value in ({} if row is None else row.paper).items():
        if column.startswith("details."):
            _, kind, name = column.split(".", maxsplit=2)
            details.setdefault(kind, {})[name] = value
    return details or None


def paper_soups(config: Config) -> str | None:
    """The kind of the paper's soups of independent members: `repaired`, or `aligned` (and repaired); None for plain."""
    row = _paper_row(config)
    return row.part if row is not None and row.part in ("repaired", "aligned") else None


def _paper_row(config: Config) -> Row | None:
    """The row of the recipe's own tables with this method, grid and population size, and no other change."""
    recipe = RECIPES.get(config.recipe)
    labels = recipe.table.split(", ") if recipe is not None and recipe.table else []
    compared = {"method", "members", "diversity.grid", "diversity.per_batch"}
    for row in (row for label in labels for row in find_table(label).rows):
        if row.recipe == config.recipe and row.change.keys() <= compared:
            full = changed(find(config.recipe).config("full"), row.change).settled
            if _kind_of(full) == _kind_of(config):
                return row
    return None


def _kind_of(config: Config) -> tuple[str, int, str, bool]:
    return config.method, config.members, config.diversity.grid, config.diversity.per_batch
