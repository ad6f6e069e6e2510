"""Checks of what the user passes to a training, before anything is built."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from papa.core.rules import Rule
from papa.errors import ConfigError, PapaWarning, did_you_mean
from papa.evaluation.scores import Counting


def check_function(name: str, value: object, expected: str = "a function") -> None:
    """Raise a `ConfigError` unless it is a function; what PyTorch users may pass in its place is told what to pass."""
    is_class, kind = isinstance(value, type), value if isinstance(value, type) else type(value)
    found = f"{name} is {'the class' if is_class else 'a'} {kind.__name__}"
    if issubclass(kind, LRScheduler):
        raise ConfigError(
            f"{found}, expected a function that makes one for each member: make_scheduler=lambda optimizer, num_steps: "
            f"{kind.__name__}(optimizer, ...)"
        )
    if is_class and issubclass(kind, Optimizer):
        raise ConfigError(
            f"{found}, expected a function from a network to its optimizer, such as lambda network: "
            f"{kind.__name__}(network.parameters())"
        )
    if is_class and issubclass(kind, nn.Module) and name == "loss":
        raise ConfigError(f"{found}, expected an instance: {kind.__name__}()")
    if not callable(value) or (name == "make_model" and isinstance(value, nn.Module)):
        raise ConfigError(f"{found}, expected {expected}")


def checked_optimizer(optimizer: object) -> Optimizer:
    """What `make_optimizer` made, or a `ConfigError` if it is no optimizer."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    remedy = "return the optimizer, and pass make_scheduler=lambda optimizer, num_steps: ... for the schedule"
    is_scheduler = isinstance(optimizer, LRScheduler)
    end = f": {remedy}" if is_scheduler else ""
    raise ConfigError(f"make_optimizer made a {type(optimizer).__name__}, expected a torch.optim.Optimizer{end}")


def check_metric(metric: object) -> None:
    """Raise unless it is a function of outputs and targets, or an object that counts over batches."""
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
    """Raise unless it is a rule, a function that makes one, or None."""
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise ConfigError(f"rule is the class {rule.__name__}, expected an instance, such as {rule.__name__}(...)")
    if not (rule is None or isinstance(rule, Rule) or callable(rule)):
        raise ConfigError(
            f"rule is a {type(rule).__name__}, expected a rule such as papa.MergeAll(every_steps=100), or a function "
            "that makes one"
        )


def check_callbacks(callbacks: object, base: type) -> None:
    """Raise unless they are callbacks; warn about methods that look like a callback's and are never called."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is a {type(callbacks).__name__}, expected a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, base):
            found = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise ConfigError(f"a callback is {found}, expected an instance of a subclass of papa.training.Callback")
        known = {name for name in dir(base) if not name.startswith("_")}
        found_names = {name for name in vars(type(callback)) if name.startswith(("on_", "before_", "after_"))}
        for name in sorted(found_names - known):
            warnings.warn(
                f"the callback {type(callback).__name__} has {name}, which is never called: "
                f"{did_you_mean(name, sorted(known))}",
                PapaWarning,
                stacklevel=4,
            )
