"""Every recipe by its name."""

from __future__ import annotations

from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config
from papa.lab.recipes import comparisons, digits, finetune, logistic, scratch, segmentation
from papa.lab.recipes.recipe import PaperDetails, PaperScores, Recipe

SHELVES = (digits, scratch, finetune, comparisons, segmentation, logistic)
"""The modules that hold recipes, in the order of listings."""

RECIPES: dict[str, Recipe] = {recipe.name: recipe for shelf in SHELVES for recipe in shelf.RECIPES}


def find(name: str) -> Recipe:
    """A recipe by its name, or a `ConfigError` with the closest match."""
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name}: {did_you_mean(name, RECIPES)}")
    return RECIPES[name]


def paper_scores(config: Config) -> PaperScores | None:
    """What the paper reports for a recipe's method, grid and population size, in its full setting."""
    return RECIPES[config.recipe].paper_scores(config) if config.recipe in RECIPES else None


def paper_details(config: Config) -> PaperDetails | None:
    """What else the paper tells of these scores, such as the score of each class."""
    details = RECIPES[config.recipe].paper_details if config.recipe in RECIPES else {}
    return details.get((config.method, config.diversity.grid, config.members))


def paper_soups(config: Config) -> str | None:
    """Which of a result's soups to compare the paper's with: `repaired` or `aligned`; None for those as they are."""
    is_known = config.recipe in RECIPES and paper_scores(config) is not None
    return RECIPES[config.recipe].paper_soups if is_known and config.method == "independent" else None
