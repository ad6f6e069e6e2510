"""What a training is given, looked at before anything is made of it."""

from __future__ import annotations

from torch import nn

from papa.errors import ConfigError
from papa.evaluate import Counting
from papa.rules import Rule


def check_functions(**functions: object) -> None:
    """Raise a `ConfigError` that names the argument which should be a function and is not."""
    for name, function in functions.items():
        if not callable(function):
            raise ConfigError(f"{name} is a {type(function).__name__}, expected a function")


def check_makers(**makers: object) -> None:
    """Raise where a network or an optimizer is given instead of what makes one for each member."""
    for name, maker in makers.items():
        is_network = name == "make_model" and isinstance(maker, nn.Module)
        if is_network or not callable(maker):
            raise ConfigError(f"{name} is a {type(maker).__name__}, expected a function that makes one for each member")


def check_metric(metric: object) -> None:
    """Raise unless it is a function of outputs and targets, or counts."""
    if callable(metric) or isinstance(metric, Counting):
        return
    missing = [name for name in ("counts", "score", "details") if not hasattr(metric, name)]
    if len(missing) == 3:
        raise ConfigError(f"metric is a {type(metric).__name__}, expected a function")
    raise ConfigError(
        f"metric is a {type(metric).__name__} without {' and '.join(missing)}, expected a function, or an object with "
        "counts, score and details"
    )


def check_rule(rule: object) -> None:
    """Raise unless it is a rule, a function that makes one, or nothing."""
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise ConfigError(f"rule is the class {rule.__name__}, expected one made of it, such as {rule.__name__}(...)")
    if not (rule is None or isinstance(rule, Rule) or callable(rule)):
        raise ConfigError(
            f"rule is a {type(rule).__name__}, expected a rule such as papa.MergeAll(every_steps=100), or a function "
            "that makes one"
        )


def check_whole(**numbers: int) -> None:
    """Raise unless they are whole numbers of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, expected a whole number, at least 1")
