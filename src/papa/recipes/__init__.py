"""Recipes: named configurations, one module per table of the paper."""

from papa.recipes.recipe import BUDGETS, Recipe
from papa.recipes.registry import RECIPES, find, paper_scores

__all__ = ["BUDGETS", "RECIPES", "Recipe", "find", "paper_scores"]
