"""Tables: small networks on few rows, until these are used up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from papa.lab.config import AverageConfig, Config, DataConfig, ModelConfig, TrainConfig, TrajectoryConfig
from papa.lab.recipes.controls import with_controls
from papa.lab.recipes.recipe import Recipe
from papa.lab.recipes.small_data import MEMBERS, MERGES

EPOCHS = 100
BATCH_LR = 0.02
"""The learning rate of one network with batches as large as those of all members together."""
NAMES = {
    "breast-cancer": "the 569 rows of scikit-learn's breast cancer table",
    "wine": "the 178 rows of scikit-learn's wine table",
    "table": "a CSV file (--data.root FILE; the last column is the class)",
}


def population(name: str, budget: str) -> Config:
    """Four perceptrons, and the average along each one's trajectory (EMA)."""
    epochs = 2 if budget == "smoke" else EPOCHS
    return Config(
        members=2 if budget == "smoke" else MEMBERS,
        data=DataConfig(name=name, validation=0.15, test_share=0.25),
        model=ModelConfig(name="mlp", width=64, dropout=0.5),
        train=TrainConfig(epochs=epochs, batch_size=16, lr=0.01, min_lr=1e-4, weight_decay=1e-3),
        average=AverageConfig(
            half_life=0.015, every_steps=5, every_epochs=epochs / MERGES, keep_best_soup=True, ensemble="probabilities"
        ),
        trajectory=TrajectoryConfig(kind="ema", decay=0.99, batch_norm_batches=10),
    )


def letters(budget: str) -> Config:
    """Wider perceptrons on a part of a larger table."""
    config = population("table", budget)
    return replace(
        config,
        data=replace(config.data, max_train=1_000),
        model=replace(config.model, width=128, dropout=0.0),
        train=replace(config.train, lr=0.1),
        average=replace(config.average, half_life=0.005),
    )


LETTERS = Recipe("letters-mlp", "perceptrons on 1,000 rows of a CSV file, such as UCI's letter recognition", letters)
RECIPES = (
    *(
        recipe
        for name, words in NAMES.items()
        for recipe in with_controls(
            Recipe(f"{name}-mlp", f"perceptrons on {words}", partial(population, name)), batch_lr=BATCH_LR
        )
    ),
    *with_controls(LETTERS, batch_lr=0.2),
)
