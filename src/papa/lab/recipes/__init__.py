"""Recipes: named configurations for the paper's tables, and networks loaded from finished runs."""

from papa.lab.recipes.loading import LanguageModel, LoadedNetwork, load, load_ensemble, load_language_model
from papa.lab.recipes.recipe import BUDGETS, Recipe
from papa.lab.recipes.registry import RECIPES, find, paper_details, paper_scores, paper_soups

__all__ = [
    "BUDGETS",
    "RECIPES",
    "LanguageModel",
    "LoadedNetwork",
    "Recipe",
    "find",
    "load",
    "load_ensemble",
    "load_language_model",
    "paper_details",
    "paper_scores",
    "paper_soups",
]
