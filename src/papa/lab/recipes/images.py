"""A user's own images, in one folder per class."""

from __future__ import annotations

from dataclasses import replace

from papa.lab.config import AverageConfig, Config, DataConfig, ModelConfig, TrainConfig
from papa.lab.recipes.recipe import Recipe, smoke


def images(budget: str) -> Config:
    """Four ResNet-20 from random weights: a short training, whose push does not depend on its length."""
    config = Config(
        members=4,
        data=DataConfig(name="images", root="images", validation=0.1),
        model=ModelConfig(name="resnet20"),
        train=TrainConfig(epochs=30, batch_size=32, lr=0.05, weight_decay=5e-4, warmup_epochs=1.0, channels_last=True),
        average=AverageConfig(half_life=0.01, every_steps=5, every_epochs=1.0, repair=5),
    )
    if budget == "mini":
        return replace(config, data=replace(config.data, max_train=4_000), train=replace(config.train, epochs=10))
    return smoke(config, width=4) if budget == "smoke" else config


RECIPES = (
    Recipe("images", "your own images, one folder per class: --data.root FOLDER, with test images or without", images),
)
