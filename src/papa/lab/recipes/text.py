"""Language models on any text: small ones for a CPU, and one for a GPU."""

from __future__ import annotations

from dataclasses import replace
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
from papa.lab.recipes.controls import with_controls
from papa.lab.recipes.recipe import Recipe, fast_precision

SHARE = 0.1
"""Of the text, for testing, and as a rule again for validation."""


def gpt(
    budget: str,
    *,
    data: DataConfig,
    network: GPTConfig,
    epochs: int,
    batch_size: int,
    lr: float,
    validation: float = SHARE,
) -> Config:
    """Four transformers with AdamW, warm-up and a cosine; a push with a half-life of 0.5% of training."""
    config = Config(
        members=4,
        data=replace(data, name="text", validation=validation, test_share=SHARE),
        model=ModelConfig(name="gpt"),
        gpt=network,
        train=TrainConfig(
            epochs=epochs,
            batch_size=batch_size,
            optimizer="adamw",
            lr=lr,
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


tiny = partial(
    gpt,
    data=DataConfig(context=64, max_train=30_000, max_test=10_000),
    network=GPTConfig(layers=2, heads=4, width=64),
    epochs=15,
    batch_size=16,
    lr=2e-3,
)
"""Two layers of width 64 on 30,000 characters."""
mini = partial(
    gpt,
    data=DataConfig(context=64, max_train=30_000, max_test=25_000),
    network=GPTConfig(layers=2, heads=4, width=64),
    epochs=100,
    batch_size=16,
    lr=2e-3,
    validation=0.03,  # or scores would take as long as steps
)
"""The same network, 100 times over 30,000 characters: data runs out before compute does."""
full = partial(
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

RECIPES = (
    Recipe("text-gpt-tiny", "small transformers on a text (--data.root FILE), a minute", tiny),
    *with_controls(
        Recipe("text-gpt-mini", "transformers that use a short text up, 6 minutes of one core", mini), batch_lr=1e-3
    ),
    Recipe("text-gpt", "transformers of 10 million parameters on a text, for a GPU", full),
)
