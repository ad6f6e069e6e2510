"""Few training data and many epochs: the regime that populations are for.

When training ends, one network has learned all it can from its data: further steps no longer help it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from papa.lab.config import AverageConfig, Config, DataConfig, ModelConfig, TrainConfig, TrajectoryConfig
from papa.lab.recipes.controls import with_controls
from papa.lab.recipes.recipe import Recipe, smoke

MEMBERS = 4
MERGES = 60
"""The number of merges in a training, as in the paper: one in 5 of 300 epochs."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A small VGG-11 on a part of a data set."""

    data: str
    num_images: int
    """Training and validation images together."""
    image_size: int | None = None
    width: int = 8
    epochs: int
    length: str = "until they are used up"
    """How long that is, in words."""
    weight_decay: float = 5e-4
    half_life: float = 0.015
    """Of the push, as a share of training."""
    batch_lr: float = 0.1
    """The learning rate of one network with batches as large as those of all members together."""

    @property
    def name(self) -> str:
        return f"{self.data}-{self.num_images // 1000}k"


ROWS = (
    _Row(data="cifar10", num_images=2_000, epochs=200, weight_decay=0.01, half_life=0.005),
    _Row(
        data="cifar100",
        num_images=5_000,
        epochs=80,
        length="80 epochs, which do not use them up",
        weight_decay=0.005,
        half_life=0.002,
        batch_lr=0.2,
    ),
    _Row(data="cifar100", num_images=2_000, epochs=240, weight_decay=0.005, half_life=0.005, batch_lr=0.1),
    _Row(
        data="fashion-mnist",
        num_images=1_000,
        image_size=32,
        width=4,
        epochs=200,
        weight_decay=2e-3,
        half_life=0.005,
        batch_lr=0.05,
    ),
)


def population(row: _Row, budget: str) -> Config:
    """Four networks with crops and flips alone, and the average along each one's trajectory (EMA)."""
    config = Config(
        members=MEMBERS,
        data=DataConfig(name=row.data, max_train=row.num_images, validation=0.1, image_size=row.image_size),
        model=ModelConfig(name="vgg11", width=row.width),
        train=TrainConfig(
            epochs=row.epochs,
            lr=0.05,
            weight_decay=row.weight_decay,
            channels_last=True,
        ),
        average=AverageConfig(
            half_life=row.half_life, every_steps=5, every_epochs=row.epochs / MERGES, repair=5, keep_best_soup=True
        ),
        trajectory=TrajectoryConfig(kind="ema", decay=0.999, batch_norm_batches=10),
    )
    if budget == "mini":
        return replace(config, train=replace(config.train, epochs=row.epochs // 10))
    return smoke(config, width=4) if budget == "smoke" else config


RECIPES = tuple(
    recipe
    for row in ROWS
    for recipe in with_controls(
        Recipe(
            name=row.name,
            summary=f"a small vgg11 on {row.num_images:,} images of {row.data}, {row.length}",
            make=partial(population, row),
        ),
        batch_lr=row.batch_lr,
    )
)
