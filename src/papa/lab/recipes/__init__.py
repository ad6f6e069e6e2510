"""Recipes: named configurations for the paper's tables, and networks loaded from finished runs."""

from typing import TYPE_CHECKING

import lazy_loader

from papa.lab.recipes.recipe import BUDGETS, Recipe
from papa.lab.recipes.registry import RECIPES, find, paper_details, paper_scores, paper_soups

if TYPE_CHECKING:
    from papa.lab.recipes.loading import LanguageModel, LoadedNetwork, load, load_ensemble, load_language_model

LOADING = ("LanguageModel", "LoadedNetwork", "load", "load_ensemble", "load_language_model")
__getattr__, __dir__, _ = lazy_loader.attach(__name__, submod_attrs={"loading": LOADING})

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
