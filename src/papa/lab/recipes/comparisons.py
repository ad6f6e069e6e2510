"""The paper's comparisons with DART, SWA and ESGD, and the base of its ablations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from papa.lab.config import (
    AverageConfig,
    Config,
    DataConfig,
    DiversityConfig,
    ModelConfig,
    TrainConfig,
    TrajectoryConfig,
)
from papa.lab.recipes.budgets import with_budget
from papa.lab.recipes.recipe import Recipe

WIDTHS = {"mini_width": 8, "smoke_width": 4}
"""Of ResNet-18 under smaller budgets."""


def ablation(budget: str) -> Config:
    """Five ResNet-18 with a multistep schedule, Mixup and label smoothing."""
    config = Config(
        members=5,
        data=DataConfig(name="cifar100"),
        model=ModelConfig(name="resnet18"),
        train=TrainConfig(epochs=300, batch_size=64, schedule="multistep", milestones=(0.5, 0.75)),
        average=AverageConfig(
            alpha=0.99, every_steps=10, every_epochs=5.0, repair=5, align_soups=True, align_batches=None
        ),
        diversity=DiversityConfig(grid="ablation"),
    )
    return with_budget(config, budget, **WIDTHS)


def dart(data: str, budget: str) -> Config:
    """Three ResNet-18, one with RandAugment, one with CutMix, one with Cutout, for 600 epochs."""
    config = Config(
        members=3,
        data=DataConfig(name=data),
        model=ModelConfig(name="resnet18"),
        train=TrainConfig(epochs=600, batch_size=64, weight_decay=5e-4),
        average=AverageConfig(alpha=0.99, every_steps=10, every_epochs=5.0, repair=5),
        diversity=DiversityConfig(grid="dart"),
    )
    return with_budget(config, budget, **WIDTHS)


def swa(budget: str) -> Config:
    """The ablations' base for 225 epochs, then 225 more with SWA; a cosine leads to its learning rate."""
    base = ablation("full")
    config = replace(
        base,
        train=replace(base.train, epochs=450, milestones=(1 / 3, 1 / 2)),
        trajectory=TrajectoryConfig(kind="swa", start=0.5, lr=0.05, anneal=10 / 450),
    )
    return with_budget(config, budget, **WIDTHS)


def esgd(budget: str) -> Config:
    """ResNet-20 in ESGD's setting: 160 epochs in batches of 128; a stronger push."""
    config = Config(
        members=10,
        data=DataConfig(name="cifar10"),
        model=ModelConfig(name="resnet20"),
        train=TrainConfig(epochs=160, batch_size=128, schedule="multistep", milestones=(81 / 160, 122 / 160)),
        average=AverageConfig(alpha=0.95, every_steps=10, every_epochs=5.0, repair=5),
        diversity=DiversityConfig(grid="none"),
    )
    return with_budget(config, budget, mini_width=None, smoke_width=4)


RECIPES = (
    Recipe(
        name="cifar100-resnet18-ablation",
        summary="the ablations' base: five ResNet-18 on CIFAR-100, multistep schedule",
        table="ablation, ablation_gradual",
        make=ablation,
    ),
    *(
        Recipe(
            name=f"{data}-resnet18-dart",
            summary=f"three ResNet-18 on {data} with DART's augmentations, 600 epochs",
            table="dart_replication",
            make=partial(dart, data),
        )
        for data in ("cifar10", "cifar100")
    ),
    Recipe(
        name="cifar100-resnet18-swa",
        summary="five ResNet-18 on CIFAR-100, averaged along their trajectories too (SWA)",
        table="cifar100_swa",
        make=swa,
    ),
    Recipe(
        name="cifar10-resnet20-esgd",
        summary="ResNet-20 on CIFAR-10 in ESGD's setting",
        table="comparing2",
        make=esgd,
    ),
)
