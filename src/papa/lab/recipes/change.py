"""Changes to a configuration by dotted names, and their translation to a shorter training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from papa.core.half_life import half_life_in_steps
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config

STRENGTH = ("average.alpha", "average.every_steps")
"""Options that determine the half-life of a push."""
EPOCHS = ("average.start", "average.stop")
"""Epochs counted from the start of training."""


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with some of its values replaced.

    Example:
        >>> changed(Config(), {"members": 3, "average.repair": 0}).members
        3
    """
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    replaced: Config = _replaced(config, tree, "config")
    return replaced


def _replaced(value: Any, tree: Mapping[str, Any], where: str) -> Any:
    fields = {field.name for field in dataclasses.fields(value)}
    for name in tree:
        if name not in fields:
            raise ConfigError(f"{where}.{name} is not known: {did_you_mean(name, fields)}")
    return dataclasses.replace(
        value,
        **{
            name: _replaced(getattr(value, name), part, f"{where}.{name}") if isinstance(part, dict) else part
            for name, part in tree.items()
        },
    )


def translated(changes: Mapping[str, Any], full: Config, small: Config) -> dict[str, Any]:
    """Changes to a full setting, translated to its smaller version.

    Epochs keep their share of training. A cadence of merges, and the half-life of a push, keep their ratio to the
    recipe's own. Under the smoke budget the population is no larger than the recipe's. Other changes stay the same.
    """
    result = dict(changes)
    shorter = small.train.epochs / full.train.epochs
    for name in EPOCHS:
        if result.get(name) is not None:
            result[name] *= shorter
    if "average.every_epochs" in result:
        result["average.every_epochs"] *= small.average.every_epochs / full.average.every_epochs
    if any(name in result for name in STRENGTH) and small.average.half_life is not None:
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
