"""All rules by name, and rules as JSON: their names and options, for the files and arguments of other libraries."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from papa.core.rules import Independent, MergeAll, MergeMany, MergePairs, Mix, Push, Rule
from papa.couplings.adaptive import AdaptivePush
from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.couplings.sparse import Shuffle, SparseAverage
from papa.couplings.weighted import GradientWeightedPush, PushPull, ScoreWeightedPush
from papa.errors import ConfigError

RULES: dict[str, type[Rule]] = {
    rule.__name__: rule
    for rule in (
        *(AdaptivePush, Elastic, Gossip, GradientWeightedPush, Independent, Lookahead, MergeAll, MergeMany, MergePairs),
        *(Mix, OuterStep, Push, PushPull, ScoreWeightedPush, Shuffle, SparseAverage),
    )
}


def rule_of(options: Mapping[str, Any]) -> Rule:
    """A rule from its name and options.

    Example:
        >>> rule_of({"name": "MergeAll", "every_steps": 100}).every_steps
        100
    """
    name = options.get("name")
    if name not in RULES:
        raise ConfigError(
            f"the name of the rule is {name!r}, expected one of {', '.join(RULES)}; a rule of your own is passed itself"
        )
    try:
        return RULES[name](**{key: value for key, value in options.items() if key != "name"})
    except TypeError as error:
        raise ConfigError(f"the options of {name} are {dict(options)}: {error}") from error


def options_of(rule: Rule) -> dict[str, Any]:
    """The name and options of a rule, as JSON can hold them; only the name if it cannot, or if the rule is your own.

    Such a rule is passed again when training resumes.
    """
    name = type(rule).__name__
    if RULES.get(name) is not type(rule):
        return {"name": name}
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.init}
    values = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in values.items()}
    try:
        json.dumps(values)
    except TypeError:
        return {"name": name}
    return {"name": name, **values}
