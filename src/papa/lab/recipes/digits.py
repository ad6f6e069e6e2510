"""The first recipe: scikit-learn's handwritten digits, in seconds on any machine."""

from __future__ import annotations

from dataclasses import replace

from papa.lab.config import AverageConfig, Config, DataConfig, DiversityConfig, ModelConfig, TrainConfig
from papa.lab.recipes.controls import with_controls
from papa.lab.recipes.recipe import Recipe


def digits(budget: str) -> Config:
    """Five small convolutional networks; a push with a half-life of 1% of training; merges without REPAIR."""
    return Config(
        members=5,
        data=DataConfig(name="digits", validation=0.1),
        model=ModelConfig(name="digits-cnn"),
        train=TrainConfig(epochs=1 if budget == "smoke" else 20, batch_size=16, channels_last=True),
        average=AverageConfig(half_life=0.01, every_steps=5, every_epochs=1.0, repair=0),
        diversity=DiversityConfig(grid="ablation"),
    )


def few_digits(budget: str) -> Config:
    """Four networks on 120 images and 30 for validation, trained until one network learns nothing more from them."""
    config = digits(budget)
    return replace(
        config,
        members=4,
        data=replace(config.data, max_train=150, validation=0.2),
        train=replace(config.train, epochs=1 if budget == "smoke" else 60, batch_size=30, weight_decay=0.005),
        average=replace(config.average, half_life=0.03),
        diversity=DiversityConfig(grid="none"),
    )


RECIPES = (
    Recipe("digits", "scikit-learn's handwritten digits, a small convolutional network, seconds on a CPU", digits),
    *with_controls(Recipe("digits-150", "the same on 150 images, until they are used up", few_digits), batch_lr=0.2),
)
