"""Fine-tuning timm's networks on CIFAR-100: the main table's last rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from papa.lab.config import AverageConfig, Config, DataConfig, DiversityConfig, ModelConfig, TrainConfig
from papa.lab.recipes.budgets import mini, smoke
from papa.lab.recipes.recipe import Recipe
from papa.rules import Push


@dataclass(frozen=True)
class _Row:
    """A pretrained network, and the paper's population size."""

    short: str
    model: str
    members: int
    repair_scope: str


ROWS = (
    # Every layer of this one stands before BatchNorm or an activation function: both scopes are the same.
    _Row("effnetv2s", "timm:tf_efficientnetv2_s.in21k", 2, "all"),
    _Row("eva02", "timm:eva02_tiny_patch14_224.mim_in22k", 4, "activations"),
    _Row("convit", "timm:convit_tiny.fb_in1k", 5, "activations"),
)


GENTLE = Push(alpha=0.9995).half_life_in_steps / (50 * 765)
"""The half-life of the paper's push as a share of training. It is far longer than from scratch: members start equal but
for their heads."""


def finetune(row: _Row, budget: str) -> Config:
    """50 epochs of AdamW; only the new head is trained during the first two; a gentler push; rarer merges."""
    config = Config(
        members=row.members,
        data=DataConfig(name="cifar100", image_size=224),
        model=ModelConfig(name=row.model, pretrained=True, frozen=0.04),
        train=TrainConfig(epochs=50, batch_size=64, optimizer="adamw", lr=1e-4, min_lr=1e-6, weight_decay=1e-4),
        average=AverageConfig(alpha=0.9995, every_steps=10, every_epochs=20.0, repair=5, repair_scope=row.repair_scope),
        diversity=DiversityConfig(grid="default"),
    )
    if budget == "mini":
        small = mini(config, width=None, epochs=3, max_train=500, half_life=GENTLE)
        return replace(small, data=replace(small.data, max_test=200), train=replace(small.train, batch_size=16))
    if budget == "smoke":
        small = smoke(config, width=None, batch_size=2, num_batches=1)
        return replace(small, data=replace(small.data, image_size=112), model=replace(small.model, pretrained=False))
    return config


def _recipe(row: _Row) -> Recipe:
    return Recipe(
        name=f"cifar100-finetune-{row.short}",
        summary=f"{row.model.removeprefix('timm:')} fine-tuned on CIFAR-100 at 224 pixels",
        table="summary_table",
        make=lambda budget: finetune(row, budget),
    )


RECIPES = tuple(_recipe(row) for row in ROWS)
