"""The first recipe: scikit-learn's handwritten digits, in seconds on any machine."""

from __future__ import annotations

from papa.config import AverageConfig, Config, DataConfig, DiversityConfig, ModelConfig, TrainConfig
from papa.recipes.recipe import Recipe


def digits() -> Config:
    """Five small convolutional networks, 30 epochs; cadences are the paper's, scaled to the length of training."""
    return Config(
        members=5,
        data=DataConfig(name="digits", validation=0.1),
        model=ModelConfig(name="digits-cnn"),
        train=TrainConfig(epochs=30, batch_size=32, lr=0.1, min_lr=1e-4, weight_decay=1e-4),
        average=AverageConfig(half_life=0.02, every_steps=5, every_epochs=1.0),
        diversity=DiversityConfig(grid="ablation"),
    )


RECIPES = (
    Recipe(
        name="digits",
        summary="scikit-learn's handwritten digits, a small convolutional network, seconds on a CPU",
        make=digits,
    ),
)
