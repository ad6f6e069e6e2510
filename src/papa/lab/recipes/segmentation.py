"""Segmentation with UNet: the tables on ISPRS Vaihingen, and the same on any folder of images and label images."""

from __future__ import annotations

from dataclasses import replace

from papa.lab.config import AverageConfig, Config, DataConfig, DiversityConfig, ModelConfig, TrainConfig
from papa.lab.recipes.budgets import mini, smoke
from papa.lab.recipes.recipe import Recipe


def unet(data: str, budget: str) -> Config:
    """50 epochs of 10,000 patches of 256 x 256, eight members, each with a draw of Mixup and smoothing.

    The paper does not give batch size, weight decay and the cadence of averaging. The batch size of 10 and the weight
    decay of 5e-4 are ours; the rest is as in its other trainings from scratch.
    """
    config = Config(
        members=8,
        data=DataConfig(name=data),
        model=ModelConfig(name="unet"),
        train=TrainConfig(
            epochs=50, batch_size=10, lr=0.01, weight_decay=5e-4, schedule="multistep", milestones=(0.5, 0.9)
        ),
        average=AverageConfig(alpha=0.99, every_steps=10, every_epochs=5.0, repair=5),
        diversity=DiversityConfig(grid="segmentation"),
    )
    if budget == "mini":
        # A patch sees as much of the ground as in the full setting, in a sixteenth of the pixels.
        small = replace(config.data, shrink=4, patch_size=64, patches_per_epoch=600, max_test=18)
        return replace(mini(config, width=8, epochs=10), data=small)
    if budget == "smoke":
        small = replace(config.data, patch_size=32, patches_per_epoch=4, max_test=2)
        return replace(smoke(config, width=2, batch_size=2), data=small)
    return config


RECIPES = (
    Recipe(
        name="vaihingen-unet",
        summary="UNet on the aerial images of ISPRS Vaihingen, a class for every pixel",
        table="image_seg1, image_seg2",
        make=lambda budget: unet("vaihingen", budget),
    ),
    Recipe(
        name="aerial-unet",
        summary="the same on any folder of images and label images",
        make=lambda budget: unet("tiles", budget),
    ),
)
