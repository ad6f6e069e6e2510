"""Recipes beyond the paper: to try papa, for your own data, and for the studies in `results/`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from papa.lab.config import (
    AverageConfig,
    Config,
    DataConfig,
    DiversityConfig,
    GPTConfig,
    ModelConfig,
    TrainConfig,
    TrajectoryConfig,
)
from papa.lab.recipes.recipe import Recipe, fast_precision, smoke

MEMBERS = 4
MERGES = 60
"""The number of merges in a training of the studies, as in the paper: one in 5 of 300 epochs."""


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
        members=MEMBERS,
        data=replace(config.data, max_train=150, validation=0.2),
        train=replace(config.train, epochs=1 if budget == "smoke" else 60, batch_size=30, weight_decay=0.005),
        average=replace(config.average, half_life=0.03),
        diversity=DiversityConfig(grid="none"),
    )


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


@dataclass(frozen=True, kw_only=True)
class _Few:
    """A small VGG-11 on a part of a data set, until its images are used up: further steps no longer help."""

    data: str
    num_images: int
    """Training and validation images together."""
    image_size: int | None = None
    width: int = 8
    epochs: int
    weight_decay: float
    half_life: float = 0.005
    """Of the push, as a share of training."""
    batch_lr: float | None = None
    """The learning rate of one network with batches as large as those of all members together."""


FEW = (
    _Few(data="cifar10", num_images=2_000, epochs=200, weight_decay=0.01),
    # 80 epochs do not use these images up.
    _Few(data="cifar100", num_images=5_000, epochs=80, weight_decay=0.005, half_life=0.002, batch_lr=0.2),
    _Few(data="cifar100", num_images=2_000, epochs=240, weight_decay=0.005),
    _Few(data="fashion-mnist", num_images=1_000, image_size=32, width=4, epochs=200, weight_decay=2e-3, batch_lr=0.05),
)


def few_images(row: _Few, budget: str) -> Config:
    """Four networks with crops and flips alone, and the average along each one's trajectory (EMA)."""
    config = Config(
        members=MEMBERS,
        data=DataConfig(name=row.data, max_train=row.num_images, validation=0.1, image_size=row.image_size),
        model=ModelConfig(name="vgg11", width=row.width),
        train=TrainConfig(
            epochs=row.epochs,
            lr=0.05,
            larger_batch_lr=row.batch_lr,
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


def table(name: str, budget: str) -> Config:
    """Four perceptrons, and the average along each one's trajectory (EMA)."""
    epochs = 2 if budget == "smoke" else 100
    return Config(
        members=2 if budget == "smoke" else MEMBERS,
        data=DataConfig(name=name, validation=0.15, test_share=0.25),
        model=ModelConfig(name="mlp", width=64, dropout=0.5),
        train=TrainConfig(epochs=epochs, batch_size=16, lr=0.01, min_lr=1e-4, weight_decay=1e-3),
        average=AverageConfig(
            half_life=0.015, every_steps=5, every_epochs=epochs / MERGES, keep_best_soup=True, ensemble="probabilities"
        ),
        trajectory=TrajectoryConfig(kind="ema", decay=0.99, batch_norm_batches=10),
    )


def letters(budget: str) -> Config:
    """Wider perceptrons on a part of a larger table."""
    config = table("table", budget)
    return replace(
        config,
        data=replace(config.data, max_train=1_000),
        model=replace(config.model, width=128, dropout=0.0),
        train=replace(config.train, lr=0.1),
        average=replace(config.average, half_life=0.005),
    )


SHARE = 0.1
"""Of a text, for testing, and as a rule again for validation."""


def gpt(
    budget: str,
    *,
    data: DataConfig,
    network: GPTConfig,
    epochs: int,
    batch_size: int,
    lr: float,
    batch_lr: float | None = None,
    validation: float = SHARE,
) -> Config:
    """Four transformers with AdamW, warm-up and a cosine; a push with a half-life of 0.5% of training."""
    config = Config(
        members=MEMBERS,
        data=replace(data, name="text", validation=validation, test_share=SHARE),
        model=ModelConfig(name="gpt"),
        gpt=network,
        train=TrainConfig(
            epochs=epochs,
            batch_size=batch_size,
            optimizer="adamw",
            lr=lr,
            larger_batch_lr=batch_lr,
            min_lr=lr / 10,
            weight_decay=0.1,
            decay="matrices",
            beta2=0.99,
            fused=True,
            warmup_epochs=0.05 * epochs,
            clip_norm=1.0,
            precision=fast_precision(),
        ),
        average=AverageConfig(
            half_life=0.005, every_steps=5, every_epochs=epochs / 20, ensemble="probabilities", keep_best_soup=True
        ),
        diversity=DiversityConfig(grid="none"),
        trajectory=TrajectoryConfig(kind="ema", decay=0.99),
    )
    if budget != "smoke":
        return config
    few = data.context * batch_size
    return replace(
        config,
        members=2,
        data=replace(config.data, max_train=2 * few + 1, max_test=few + 1),
        gpt=replace(network, layers=1, heads=2, width=16),
        train=replace(config.train, epochs=2, warmup_epochs=0.0),
        average=replace(config.average, half_life=0.5, every_steps=1, every_epochs=1.0),
    )


SMALL = GPTConfig(layers=2, heads=4, width=64)
gpt_tiny = partial(
    gpt,
    data=DataConfig(context=64, max_train=30_000, max_test=10_000),
    network=SMALL,
    epochs=15,
    batch_size=16,
    lr=2e-3,
)
"""Two layers of width 64 on 30,000 characters."""
gpt_mini = partial(
    gpt,
    data=DataConfig(context=64, max_train=30_000, max_test=25_000),
    network=SMALL,
    epochs=100,
    batch_size=16,
    lr=2e-3,
    batch_lr=1e-3,
    validation=0.03,  # or scores would take as long as steps
)
"""The same network, 100 times over 30,000 characters: data runs out before compute does."""
gpt_full = partial(
    gpt,
    data=DataConfig(context=256),
    network=GPTConfig(
        layers=6, heads=6, width=384, dropout=0.2, mlp="swiglu", norm="rms", positions="rotary", bias=False
    ),
    epochs=90,
    batch_size=64,
    lr=1e-3,
)
"""Six layers of width 384 with newer parts, on all of a text of about a million characters."""

TRY, YOURS, STUDY = "try it", "your data", "studies"

RECIPES = (
    Recipe("digits", "scikit-learn's handwritten digits, seconds on a CPU", digits, group=TRY),
    Recipe("digits-150", "the same on 150 images, until they are used up", few_digits, group=TRY),
    Recipe("breast-cancer-mlp", "569 rows of scikit-learn's table", partial(table, "breast-cancer"), group=TRY),
    Recipe("wine-mlp", "178 rows of scikit-learn's table", partial(table, "wine"), group=TRY),
    Recipe("images", "one folder of images per class (--data.root FOLDER)", images, group=YOURS),
    Recipe("table-mlp", "a CSV file whose last column is the class", partial(table, "table"), group=YOURS),
    Recipe("text-gpt-tiny", "small transformers on a text (--data.root FILE)", gpt_tiny, group=YOURS),
    Recipe("text-gpt", "transformers of 10 million parameters, for a GPU", gpt_full, group=YOURS),
    *(
        Recipe(
            f"{row.data}-{row.num_images // 1000}k",
            f"a small vgg11 on {row.num_images:,} images of {row.data}",
            partial(few_images, row),
            group=STUDY,
        )
        for row in FEW
    ),
    Recipe("letters-mlp", "perceptrons on 1,000 rows of UCI's letter recognition", letters, group=STUDY),
    Recipe("text-gpt-mini", "small transformers that use a short text up", gpt_mini, group=STUDY),
)
