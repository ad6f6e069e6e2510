"""Smaller versions of a configuration: the same experiment with fewer images, fewer epochs and a narrower network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from papa.config import Config
from papa.rules import HALF_LIFE_SHARE

SHORT: dict[str, Any] = {
    "every_epochs": 1.0,
    "align_every_epochs": 1.0,
    "mutation_every_epochs": 1.0,
    "align_batches": 10,
}
"""What happens every few epochs of a long training happens every epoch of a short one, and looks at less data."""


def mini(
    config: Config,
    *,
    width: int | None,
    epochs: int = 20,
    max_train: int = 8_000,
    half_life: float = HALF_LIFE_SHARE,
) -> Config:
    """Ten to twenty minutes on two CPU cores.

    What the paper says in epochs and steps of its long training is scaled to the short one: a push with a half-life
    of 690 steps would never bring members together in 3,000.

    Args:
        config: the full setting.
        width: of the network; None for as it is.
        epochs: how many.
        max_train: how many images at most.
        half_life: of the push, as a share of training.
    """
    return replace(
        config,
        members=min(config.members, 5),
        data=replace(config.data, max_train=max_train),
        model=replace(config.model, width=width),
        train=replace(config.train, epochs=epochs, precision=fast_precision(), channels_last=True),
        average=replace(config.average, alpha=None, half_life=half_life, **SHORT),
    )


def fast_precision() -> str:
    """bfloat16 where the hardware computes in it, float32 elsewhere: emulated it is ten times slower."""
    is_native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if is_native else "float32"


def smoke(config: Config, *, width: int | None, batch_size: int = 16, num_batches: int = 2) -> Config:
    """A few steps, to see that everything works."""
    num_images = round(batch_size * num_batches / (1.0 - 0.25)) + 1
    return replace(
        config,
        members=min(config.members, 2),
        data=replace(config.data, max_train=num_images, max_test=batch_size, validation=0.25),
        model=replace(config.model, width=width),
        train=replace(config.train, epochs=2, batch_size=batch_size),
        average=replace(config.average, every_steps=1, probe_steps=1, **SHORT),
    )
