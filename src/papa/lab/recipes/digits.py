"""The first recipe: scikit-learn's handwritten digits, in seconds on any machine."""

from __future__ import annotations

from papa.lab.config import AverageConfig, Config, DataConfig, DiversityConfig, ModelConfig, TrainConfig
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


RECIPES = (
    Recipe("digits", "scikit-learn's handwritten digits, a small convolutional network, seconds on a CPU", digits),
)
