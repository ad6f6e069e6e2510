"""Checks of what the user passes to a training, before anything is built."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from papa.core.rules import Rule
from papa.errors import ConfigError, PapaWarning, did_you_mean
from papa.evaluation.scores import Counting


def check_functions(**functions: object) -> None:
    """Raise a `ConfigError` that names the argument that is not a function."""
    for name, function in functions.items():
        if not callable(function):
            raise ConfigError(f"{name} is a {type(function).__name__}, expected a function")


def check_makers(**makers: object) -> None:
    """Raise if a network or an optimizer is given instead of a function that makes one for each member."""
    for name, maker in makers.items():
        if isinstance(maker, type) and issubclass(maker, Optimizer):
            called = maker.__name__
            raise ConfigError(
                f"{name} is the class {called}, expected a function from a network to its optimizer, such as "
                f"lambda network: {called}(network.parameters())"
            )
        is_network = name == "make_model" and isinstance(maker, nn.Module)
        if is_network or not callable(maker):
            raise ConfigError(f"{name} is a {type(maker).__name__}, expected a function that makes one for each member")


def check_loss(loss: object) -> None:
    """Raise if the class of a loss is given instead of an instance."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ConfigError(f"loss is the class {loss.__name__}, expected an instance: {loss.__name__}()")


def check_schedule(schedule: object, make_scheduler: object) -> None:
    """Raise if a PyTorch scheduler is given where a function is expected."""
    for name, value in (("schedule", schedule), ("make_scheduler", make_scheduler)):
        is_class = isinstance(value, type) and issubclass(value, LRScheduler)
        if is_class or isinstance(value, LRScheduler):
            kind = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ConfigError(
                f"{name} is {'the class' if is_class else 'a'} {kind}, expected a function that makes one for each "
                f"member: make_scheduler=lambda optimizer, num_steps: {kind}(optimizer, ...)"
            )
    if make_scheduler is not None and not callable(make_scheduler):
        raise ConfigError(f"make_scheduler is a {type(make_scheduler).__name__}, expected a function")


def check_dtype(dtype: object) -> None:
    """Raise unless it is a torch dtype, or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"autocast is {dtype!r}, expected a dtype, such as torch.bfloat16, or None")


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


def check_whole(**numbers: int) -> None:
    """Raise unless all are whole numbers of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, expected a whole number, at least 1")


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
