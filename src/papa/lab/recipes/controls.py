"""One network with the compute of a population: the controls of the recipes whose data are used up."""

from __future__ import annotations

from dataclasses import replace

from papa.lab.config import Config, settled
from papa.lab.recipes.recipe import Recipe


def one_network(recipe: Recipe, budget: str) -> Config:
    """One network, trained as many times longer as there are members."""
    return replace(settled(replace(recipe.config(budget), method="longer")), method="independent")


def large_batch(recipe: Recipe, lr: float, budget: str) -> Config:
    """One network with batches as large as those of all members together, for as many steps as one member takes."""
    config, single = recipe.config(budget), one_network(recipe, budget)
    if budget == "smoke":  # whose data would not fill one such batch
        return single
    train = replace(
        single.train, batch_size=config.train.batch_size * config.members, lr=lr, min_lr=min(lr, config.train.min_lr)
    )
    return replace(single, train=train)


def with_controls(recipe: Recipe, *, batch_lr: float) -> tuple[Recipe, ...]:
    """A recipe, the same with one network that trains longer, and with one that has larger batches.

    `batch_lr` is the learning rate of the latter.
    """
    return (
        recipe,
        Recipe(
            f"{recipe.name}-long",
            f"one network of {recipe.name}, trained as long as the whole population",
            lambda budget: one_network(recipe, budget),
        ),
        Recipe(
            f"{recipe.name}-batch",
            f"one network of {recipe.name}, with batches as large as those of the whole population",
            lambda budget: large_batch(recipe, batch_lr, budget),
        ),
    )
