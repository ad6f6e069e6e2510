"""Rules as JSON: their names and options, for the files and arguments of other libraries."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from papa.core import merges, push
from papa.core.rules import Rule
from papa.couplings import adaptive, anchored, sparse, weighted
from papa.errors import ConfigError


def rule_of(options: Mapping[str, Any]) -> Rule:
    """A rule from its name and options.

    Example:
        >>> rule_of({"name": "MergeAll", "every_steps": 100}).every_steps
        100
    """
    classes = _rules()
    known = sorted(classes)
    name = options.get("name")
    if name not in known:
        raise ConfigError(
            f"the name of the rule is {name!r}, expected one of {', '.join(known)}; a rule of your own is passed itself"
        )
    try:
        rule: Rule = classes[name](**{key: value for key, value in options.items() if key != "name"})
    except TypeError as error:
        raise ConfigError(f"the options of {name} are {dict(options)}: {error}") from error
    return rule


def options_of(rule: Rule) -> dict[str, Any]:
    """The name and options of a rule, as JSON can hold them; only the name if it cannot, or if the rule is your own.

    Such a rule is passed again when training resumes.
    """
    name = type(rule).__name__
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.init}
    values = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in values.items()}
    try:
        json.dumps(values)
    except TypeError:
        values = {}
    return {"name": name, **(values if _rules().get(name) is type(rule) else {})}


def _rules() -> dict[str, type[Rule]]:
    """The rules of papa by name."""
    modules = push, merges, adaptive, anchored, sparse, weighted
    found = (value for module in modules for value in vars(module).values() if isinstance(value, type))
    return {one.__name__: one for one in found if issubclass(one, Rule) and one is not Rule}
