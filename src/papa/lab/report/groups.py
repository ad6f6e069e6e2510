"""Which runs belong together: those that differ in nothing but the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papa.lab.config import idle_options
from papa.lab.report.fields import flat, text

BESIDE_THE_POINT = ("recipe", "method", "seed", "device", "analysis", "data.root")
"""What does not make a run another experiment, or is named anyway."""


def groups_of(results: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Runs that differ in nothing but the seed, with their position, under a name that says what is theirs.

    Example:
        >>> runs = [{"recipe": "digits", "method": "papa", "config": {"members": p, "seed": 1}} for p in (3, 3, 5)]
        >>> [(label, len(group)) for label, group in groups_of(runs).items()]
        [('papa, members 3', 2), ('papa, members 5', 1)]
    """
    configs = [dict(flat(result.get("config"))) for result in results]
    names = [(text(result.get("recipe")), text(result.get("method"))) for result in results]
    has_recipes = len({recipe for recipe, _ in names}) > 1
    groups: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for index, (recipe, method) in enumerate(names):
        others = [configs[other] for other, name in enumerate(names) if name == (recipe, method)]
        beside = {*BESIDE_THE_POINT, *idle_options(method)}
        told = [
            f"{key} {text(configs[index].get(key))}"
            for key in dict.fromkeys(key for config in others for key in config)
            if key not in beside and any(config.get(key) != configs[index].get(key) for config in others)
        ]
        label = ", ".join([f"{recipe} {method}" if has_recipes else method, *told])
        groups.setdefault(label, []).append((index, results[index]))
    return groups
