"""A recipe: a name, a line of description, and a function from a budget to a config; and smaller budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from papa.core.half_life import HALF_LIFE, half_life_in_steps
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config, changed

BUDGETS = {
    "full": "the paper's setting",
    "mini": "ten to twenty minutes on two CPU cores",
    "smoke": "seconds: to see that everything works",
}
PAPER = "the paper's tables"


@dataclass(frozen=True)
class Recipe:
    """A named configuration."""

    name: str
    summary: str
    """One line for listings."""
    make: Callable[[str], Config]
    """From a budget to the configuration."""
    table: str = ""
    """The labels of the paper's tables that it belongs to, separated by commas."""
    group: str = PAPER
    """Where `papa ls` shows it."""

    def config(self, budget: str | None = None) -> Config:
        """The recipe's configuration under a budget, with its name written into it."""
        budget = budget or "full"
        if budget not in BUDGETS:
            raise ConfigError(f"--budget is {budget}: {did_you_mean(budget, BUDGETS)}")
        return replace(self.make(budget), recipe=self.name)


ALIGN_BATCHES = 10
"""The number of batches for alignment, instead of all data."""
CADENCES = ("every_epochs", "align_every_epochs", "mutation_every_epochs")
"""Options in epochs that are scaled with the length of training."""


def mini(
    config: Config,
    *,
    width: int | None,
    epochs: int = 20,
    max_train: int = 8_000,
    half_life: float = HALF_LIFE,
    lr_divisor: float = 1.0,
) -> Config:
    """Ten to twenty minutes on two CPU cores.

    Cadences in epochs and the half-life of the push keep their share of training: with its half-life of 690 steps, the
    paper's push would not bring members together in 3,000 steps, nor would four merges.

    `half_life` is a share of training, `width` None leaves the network unchanged, `lr_divisor` divides the learning
    rate.
    """
    shorter = epochs / config.train.epochs
    cadences: dict[str, Any] = {name: getattr(config.average, name) * shorter for name in CADENCES}
    return replace(
        config,
        members=min(config.members, 5),
        data=replace(config.data, max_train=max_train),
        model=replace(config.model, width=width),
        train=replace(
            config.train,
            epochs=epochs,
            lr=config.train.lr / lr_divisor,
            precision=fast_precision(),
            channels_last=True,
        ),
        average=replace(config.average, alpha=None, half_life=half_life, align_batches=ALIGN_BATCHES, **cadences),
    )


def with_budget(config: Config, budget: str, *, mini_width: int | None, smoke_width: int, **options: Any) -> Config:
    """A configuration under a budget."""
    if budget == "mini":
        return mini(config, width=mini_width, **options)
    return smoke(config, width=smoke_width) if budget == "smoke" else config


def fast_precision() -> str:
    """bfloat16 on hardware that computes in it, else float32: emulated bfloat16 is ten times slower."""
    import torch  # a list of recipes does without

    is_native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if is_native else "float32"


def smoke(config: Config, *, width: int | None, batch_size: int = 16, num_batches: int = 2) -> Config:
    """A few steps, to see that everything works."""
    num_images = round(batch_size * num_batches / (1.0 - 0.25)) + 1
    cadences: dict[str, Any] = dict.fromkeys(CADENCES, 1.0)
    return replace(
        config,
        members=min(config.members, 2),
        data=replace(config.data, max_train=num_images, max_test=batch_size, validation=0.25),
        model=replace(config.model, width=width),
        train=replace(config.train, epochs=2, batch_size=batch_size),
        average=replace(config.average, every_steps=1, probe_steps=1, align_batches=ALIGN_BATCHES, **cadences),
    )


def translated(changes: Mapping[str, Any], full: Config, small: Config) -> dict[str, Any]:
    """Changes to a full setting, translated to its smaller version.

    Epochs keep their share of training. A cadence of merges, and the half-life of a push, keep their ratio to the
    recipe's own. Under the smoke budget the population is no larger than the recipe's. Other changes stay the same.
    """
    result = dict(changes)
    shorter = small.train.epochs / full.train.epochs
    for name in ("average.start", "average.stop"):
        if result.get(name) is not None:
            result[name] *= shorter
    if "average.every_epochs" in result:
        result["average.every_epochs"] *= small.average.every_epochs / full.average.every_epochs
    strength = any(name in result for name in ("average.alpha", "average.every_steps"))
    if strength and small.average.half_life is not None:
        ratio = _half_life(changed(full, result)) / _half_life(full)
        result["average.alpha"] = None
        result["average.half_life"] = small.average.half_life * ratio
    if "members" in result and small.members < 3:
        result["members"] = min(result["members"], small.members)
    return result


def _half_life(config: Config) -> float:
    """In steps."""
    average = config.average
    assert average.alpha is not None  # full settings are the paper's
    return half_life_in_steps(average.alpha, average.every_steps)
