"""Changing a configuration by dotted names, and saying the same change of a shorter training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config
from papa.rules import Push

STRENGTH = ("average.alpha", "average.every_steps")
"""What the half-life of a push is made of."""
MOMENTS = ("average.start", "average.stop")
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
    """Changes to a full setting, said of its smaller version.

    Moments of training keep their share of it. A cadence of merges, and the half-life of a push, keep their ratio to
    the unchanged ones: twice as often there is twice as often here. A population is no larger than a recipe that was
    made to end in seconds has. All else stays as it is.

    Args:
        changes: by dotted names.
        full: the full setting, unchanged.
        small: its smaller version, unchanged.
    """
    said = dict(changes)
    shorter = small.train.epochs / full.train.epochs
    for name in MOMENTS:
        if said.get(name) is not None:
            said[name] *= shorter
    if "average.every_epochs" in said:
        said["average.every_epochs"] *= small.average.every_epochs / full.average.every_epochs
    if any(name in said for name in STRENGTH) and small.average.half_life is not None:
        ratio = _half_life(changed(full, said)) / _half_life(full)
        said["average.alpha"] = None
        said["average.half_life"] = small.average.half_life * ratio
    if "members" in said and small.members < 3:
        said["members"] = min(said["members"], small.members)
    return said


def _half_life(config: Config) -> float:
    """In steps."""
    average = config.average
    return Push(average.alpha, every_steps=average.every_steps).half_life_in_steps
