"""Recipes: named configurations, one module per table of the paper."""

from papa.recipes.recipe import BUDGETS, Recipe
from papa.recipes.registry import RECIPES, find, paper_details, paper_scores, paper_soups

__all__ = ["BUDGETS", "RECIPES", "Recipe", "find", "paper_details", "paper_scores", "paper_soups"]
