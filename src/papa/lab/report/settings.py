"""Which runs can be averaged over: those that differ only in the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from papa.lab.config import flat, idle_options
from papa.lab.report.words import text

Settings: TypeAlias = dict[str, list[tuple[int, Mapping[str, Any]]]]
"""Runs with their index, by the label of their setting."""
NOT_COMPARED = ("recipe", "method", "seed", "device", "analysis", "data.root")
"""Options that do not change what is trained, or that the label already names."""


def runs_by_setting(results: Sequence[Mapping[str, Any]]) -> Settings:
    """Runs that differ only in the seed, with their index, under a label that names what sets them apart.

    Example:
        >>> runs = [{"recipe": "digits", "method": "papa", "config": {"members": p, "seed": 1}} for p in (3, 3, 5)]
        >>> [(label, len(group)) for label, group in runs_by_setting(runs).items()]
        [('papa, members 3', 2), ('papa, members 5', 1)]
    """
    configs = [dict(flat(result.get("config"))) for result in results]
    names = [(text(result.get("recipe")), text(result.get("method"))) for result in results]
    has_recipes = len({recipe for recipe, _ in names}) > 1
    settings: Settings = {}
    for index, (recipe, method) in enumerate(names):
        same_method = [configs[other] for other, name in enumerate(names) if name == (recipe, method)]
        ignored = {*NOT_COMPARED, *idle_options(method)}
        differences = [
            f"{key} {text(configs[index].get(key))}"
            for key in dict.fromkeys(key for config in same_method for key in config)
            if key not in ignored and any(config.get(key) != configs[index].get(key) for config in same_method)
        ]
        label = ", ".join([f"{recipe} {method}" if has_recipes else method, *differences])
        settings.setdefault(label, []).append((index, results[index]))
    return settings
