"""Recipes: named configurations, one module per table of the paper; and the networks that came of them."""

from papa.lab.recipes.loading import Ready, load
from papa.lab.recipes.recipe import BUDGETS, Recipe
from papa.lab.recipes.registry import RECIPES, find, paper_details, paper_scores, paper_soups

__all__ = ["BUDGETS", "RECIPES", "Ready", "Recipe", "find", "load", "paper_details", "paper_scores", "paper_soups"]
