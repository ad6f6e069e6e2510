"""The paper's recipes: each a function from a budget to a config, with the full setting first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from papa.core.half_life import half_life_in_steps
from papa.lab.config import (
    AverageConfig,
    Config,
    DataConfig,
    DiversityConfig,
    ModelConfig,
    TrainConfig,
    TrajectoryConfig,
)
from papa.lab.recipes.recipe import Recipe, mini, smoke, with_budget

MERGES_AND_PUSHES = AverageConfig(alpha=0.99, every_steps=10, every_epochs=5.0, repair=5)
"""How members are averaged in most of the paper's settings."""
ALIGNED_SOUPS = replace(MERGES_AND_PUSHES, align_soups=True, align_batches=None)
"""The same, with soups of independent members aligned and repaired."""
RESNET18_WIDTHS = {"mini_width": 8, "smoke_width": 4}


@dataclass(frozen=True)
class _Cifar:
    """A network on a data set, and its widths and training under smaller budgets."""

    data: str
    model: str
    tables: str
    mini_width: int
    mini_epochs: int = 20
    mini_lr_divisor: float = 1.0
    """Divides the learning rate. Where several were tried, independent members scored highest on validation data with
    this one (`RESULTS.md`)."""


CIFAR_ROWS = (
    _Cifar("cifar10", "vgg11", "cifar10_gradual", mini_width=12, mini_epochs=10, mini_lr_divisor=10.0),
    _Cifar("cifar10", "resnet18", "cifar10_res_gradual", mini_width=8),
    _Cifar("cifar100", "vgg16", "cifar100_gradual, comparing_long", mini_width=8),
    _Cifar("cifar100", "resnet18", "cifar100_res_gradual, comparing_long", mini_width=8),
)


def cifar(row: _Cifar, budget: str) -> Config:
    """300 epochs of SGD with a cosine, ten members, each with a draw from the default grid.

    Members are repaired after merges; soups of independent members are aligned and repaired.
    """
    config = Config(
        members=10,
        data=DataConfig(name=row.data),
        model=ModelConfig(name=row.model),
        train=TrainConfig(epochs=300, batch_size=64, lr=0.1, min_lr=1e-4, weight_decay=1e-4),
        average=ALIGNED_SOUPS,
        diversity=DiversityConfig(grid="default"),
    )
    small = {"epochs": row.mini_epochs, "lr_divisor": row.mini_lr_divisor}
    return with_budget(config, budget, mini_width=row.mini_width, smoke_width=4, **small)


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


TIMM_ROWS = {
    # Every layer of this one stands before BatchNorm or an activation function: both scopes of REPAIR are the same.
    "effnetv2s": ("timm:tf_efficientnetv2_s.in21k", 2, "all"),
    "eva02": ("timm:eva02_tiny_patch14_224.mim_in22k", 4, "activations"),
    "convit": ("timm:convit_tiny.fb_in1k", 5, "activations"),
}
"""Pretrained networks, the paper's population sizes, and the layers that are repaired."""
GENTLE = half_life_in_steps(0.9995, every_steps=10) / (50 * 765)
"""The half-life of the paper's push as a share of training. It is far longer than from scratch: members start equal but
for their heads."""


def finetune(model: str, members: int, repair_scope: str, budget: str) -> Config:
    """50 epochs of AdamW; only the new head is trained during the first two; a gentler push; rarer merges."""
    config = Config(
        members=members,
        data=DataConfig(name="cifar100", image_size=224),
        model=ModelConfig(name=model, pretrained=True, frozen=0.04),
        train=TrainConfig(epochs=50, batch_size=64, optimizer="adamw", lr=1e-4, min_lr=1e-6, weight_decay=1e-4),
        average=AverageConfig(alpha=0.9995, every_steps=10, every_epochs=20.0, repair=5, repair_scope=repair_scope),
        diversity=DiversityConfig(grid="default"),
    )
    if budget == "mini":
        small = mini(config, width=None, epochs=3, max_train=500, half_life=GENTLE)
        return replace(small, data=replace(small.data, max_test=200), train=replace(small.train, batch_size=16))
    if budget == "smoke":
        small = smoke(config, width=None, batch_size=2, num_batches=1)
        return replace(small, data=replace(small.data, image_size=112), model=replace(small.model, pretrained=False))
    return config


def ablation(budget: str) -> Config:
    """Five ResNet-18 with a multistep schedule, Mixup and label smoothing."""
    config = Config(
        members=5,
        data=DataConfig(name="cifar100"),
        model=ModelConfig(name="resnet18"),
        train=TrainConfig(epochs=300, batch_size=64, schedule="multistep", milestones=(0.5, 0.75)),
        average=ALIGNED_SOUPS,
        diversity=DiversityConfig(grid="ablation"),
    )
    return with_budget(config, budget, **RESNET18_WIDTHS)


def dart(data: str, budget: str) -> Config:
    """Three ResNet-18, one with RandAugment, one with CutMix, one with Cutout, for 600 epochs."""
    config = Config(
        members=3,
        data=DataConfig(name=data),
        model=ModelConfig(name="resnet18"),
        train=TrainConfig(epochs=600, batch_size=64, weight_decay=5e-4),
        average=MERGES_AND_PUSHES,
        diversity=DiversityConfig(grid="dart"),
    )
    return with_budget(config, budget, **RESNET18_WIDTHS)


def swa(budget: str) -> Config:
    """The ablations' base for 225 epochs, then 225 more with SWA; a cosine leads to its learning rate."""
    base = ablation("full")
    config = replace(
        base,
        train=replace(base.train, epochs=450, milestones=(1 / 3, 1 / 2)),
        trajectory=TrajectoryConfig(kind="swa", start=0.5, lr=0.05, anneal=10 / 450),
    )
    return with_budget(config, budget, **RESNET18_WIDTHS)


def esgd(budget: str) -> Config:
    """ResNet-20 in ESGD's setting: 160 epochs in batches of 128; a stronger push."""
    config = Config(
        members=10,
        data=DataConfig(name="cifar10"),
        model=ModelConfig(name="resnet20"),
        train=TrainConfig(epochs=160, batch_size=128, schedule="multistep", milestones=(81 / 160, 122 / 160)),
        average=replace(MERGES_AND_PUSHES, alpha=0.95),
        diversity=DiversityConfig(grid="none"),
    )
    return with_budget(config, budget, mini_width=None, smoke_width=4)


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
        average=MERGES_AND_PUSHES,
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
    *(
        Recipe(f"{row.data}-{row.model}", f"{row.model} from scratch on {row.data}", partial(cifar, row), row.tables)
        for row in CIFAR_ROWS
    ),
    Recipe("imagenet-resnet50", "ResNet-50 from scratch on ImageNet", imagenet, "summary_table"),
    *(
        Recipe(
            f"cifar100-finetune-{short}",
            f"{model.removeprefix('timm:')} fine-tuned on CIFAR-100 at 224 pixels",
            partial(finetune, model, members, scope),
            "summary_table",
        )
        for short, (model, members, scope) in TIMM_ROWS.items()
    ),
    Recipe(
        "cifar100-resnet18-ablation",
        "the ablations' base: five ResNet-18 on CIFAR-100, multistep schedule",
        ablation,
        "ablation, ablation_gradual",
    ),
    *(
        Recipe(
            f"{data}-resnet18-dart",
            f"three ResNet-18 on {data} with DART's augmentations, 600 epochs",
            partial(dart, data),
            "dart_replication",
        )
        for data in ("cifar10", "cifar100")
    ),
    Recipe(
        "cifar100-resnet18-swa",
        "five ResNet-18 on CIFAR-100, averaged along their trajectories too (SWA)",
        swa,
        "cifar100_swa",
    ),
    Recipe("cifar10-resnet20-esgd", "ResNet-20 on CIFAR-10 in ESGD's setting", esgd, "comparing2"),
    Recipe(
        "vaihingen-unet",
        "UNet on the aerial images of ISPRS Vaihingen, a class for every pixel",
        partial(unet, "vaihingen"),
        "image_seg1, image_seg2",
    ),
    Recipe(
        "aerial-unet",
        "images with label images: a class per pixel",
        partial(unet, "tiles"),
        group="your data",
    ),
    Recipe(
        "optdigits-logistic",
        "logistic regression on UCI's optical digits, one image at a time",
        logistic,
        "logistic",
    ),
)
