"""Training from scratch: the main table's CIFAR and ImageNet rows, the detailed tables, and ten times longer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from papa.lab.config import AverageConfig, Config, DataConfig, DiversityConfig, ModelConfig, TrainConfig
from papa.lab.recipes.budgets import mini, smoke, with_budget
from papa.lab.recipes.recipe import Recipe


@dataclass(frozen=True)
class _Row:
    """A network on a data set, and its widths and training under smaller budgets."""

    data: str
    model: str
    table: str
    mini_width: int
    mini_epochs: int = 20
    mini_lr_divisor: float = 1.0
    """Divides the learning rate. Where several were tried, independent members scored highest on validation data with
    this one (`RESULTS.md`)."""

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}"


CIFAR_ROWS = (
    _Row("cifar10", "vgg11", "cifar10_gradual", mini_width=12, mini_epochs=10, mini_lr_divisor=10.0),
    _Row("cifar10", "resnet18", "cifar10_res_gradual", mini_width=8),
    _Row("cifar100", "vgg16", "cifar100_gradual", mini_width=8),
    _Row("cifar100", "resnet18", "cifar100_res_gradual", mini_width=8),
)


def cifar(row: _Row, budget: str) -> Config:
    """300 epochs of SGD with a cosine, ten members, each with a draw from the default grid.

    Members are repaired after merges; soups of independent members are aligned and repaired.
    """
    config = Config(
        members=10,
        data=DataConfig(name=row.data),
        model=ModelConfig(name=row.model),
        train=TrainConfig(epochs=300, batch_size=64, lr=0.1, min_lr=1e-4, weight_decay=1e-4),
        average=AverageConfig(
            alpha=0.99, every_steps=10, every_epochs=5.0, repair=5, align_soups=True, align_batches=None
        ),
        diversity=DiversityConfig(grid="default"),
    )
    return with_budget(
        config,
        budget,
        mini_width=row.mini_width,
        smoke_width=4,
        epochs=row.mini_epochs,
        lr_divisor=row.mini_lr_divisor,
    )


def cifar_long(row: _Row, budget: str) -> Config:
    """The same compute spent on one network: ten times the epochs, a new policy for every mini-batch."""
    short = cifar(row, budget)
    num_members = short.members if budget != "full" else 10
    return replace(
        short,
        method="independent",
        members=1,
        train=replace(short.train, epochs=short.train.epochs * num_members),
        diversity=replace(short.diversity, per_batch=True),
    )


def imagenet(budget: str) -> Config:
    """90 epochs of ResNet-50, three members; merges every epoch. Only soups of independent members are repaired."""
    config = Config(
        members=3,
        data=DataConfig(name="imagenet", image_size=224),
        model=ModelConfig(name="timm:resnet50"),
        train=TrainConfig(epochs=90, batch_size=256, precision="bfloat16", channels_last=True),
        average=AverageConfig(alpha=0.99, every_steps=10, every_epochs=1.0, repair=0, repair_soups=5),
        diversity=DiversityConfig(grid="imagenet"),
    )
    if budget == "mini":
        small = mini(config, width=None, epochs=5, max_train=2_000)
        return replace(
            small, data=replace(small.data, image_size=64, max_test=1_000), train=replace(small.train, batch_size=32)
        )
    if budget == "smoke":
        small = smoke(config, width=None, batch_size=4)
        return replace(small, data=replace(small.data, image_size=32), model=ModelConfig(name="timm:resnet10t"))
    return config


def _cifar_recipe(row: _Row) -> Recipe:
    return Recipe(
        name=row.name,
        summary=f"{row.model} from scratch on {row.data}",
        table=row.table,
        make=lambda budget: cifar(row, budget),
    )


def _long_recipe(row: _Row) -> Recipe:
    return Recipe(
        name=f"{row.name}-long",
        summary=f"one {row.model} on {row.data}, trained as long as the whole population",
        table="comparing_long" if row.data == "cifar100" else "",
        make=lambda budget: cifar_long(row, budget),
    )


RECIPES = (
    *(_cifar_recipe(row) for row in CIFAR_ROWS),
    *(_long_recipe(row) for row in CIFAR_ROWS),
    Recipe(
        name="imagenet-resnet50",
        summary="ResNet-50 from scratch on ImageNet",
        table="summary_table",
        make=imagenet,
    ),
)
