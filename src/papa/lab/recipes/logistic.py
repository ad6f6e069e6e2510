"""Logistic regression on UCI's optical digits: the paper's appendix on single-layer models."""

from __future__ import annotations

from dataclasses import replace

from papa.lab.config import AverageConfig, Config, DataConfig, ModelConfig, TrainConfig
from papa.lab.recipes.budgets import smoke
from papa.lab.recipes.recipe import Recipe


def logistic(budget: str) -> Config:
    """Ten linear layers, one image at a time, merged after every epoch; trained stacked, for speed."""
    config = Config(
        method="papa-all",
        members=10,
        data=DataConfig(name="optdigits"),
        model=ModelConfig(name="linear"),
        train=TrainConfig(
            epochs=10, batch_size=1, lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", engine="stacked"
        ),
        average=AverageConfig(alpha=0.99, every_epochs=1.0),
    )
    # The paper's setting takes half a minute: mini is the same.
    if budget == "smoke":
        small = smoke(config, width=None, batch_size=1, num_batches=40)
        return replace(small, data=replace(small.data, max_test=40))
    return config


RECIPES = (
    Recipe(
        name="optdigits-logistic",
        summary="logistic regression on UCI's optical digits, one image at a time",
        table="logistic",
        make=logistic,
    ),
)
