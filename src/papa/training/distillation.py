"""Distillation: one network trained to give the outputs of an ensemble, at the cost of one network when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papa.core.rules import Independent
from papa.errors import ConfigError
from papa.evaluation.inputs import Inputs, outputs_of
from papa.evaluation.scores import Loss, evaluating
from papa.training import Outcome, train
from papa.training.task import Task


def distill(
    teacher: nn.Module,
    make_model: Callable[[], nn.Module],
    data: Any,
    *,
    num_epochs: int,
    task: Task | None = None,
    weight: float = 0.9,
    match: Loss | None = None,
    num_members: int = 1,
    **options: Any,
) -> Outcome:
    """Train a network on a teacher's outputs and on the targets.

        loss = weight * match(outputs, teacher's outputs) + (1 - weight) * task's loss(outputs, targets)

    What an average soup gives for no training at all, this gives for one more; both cost one network when used.

    Example:
        >>> from papa import Ensemble
        >>> inputs = torch.randn(200, 4)
        >>> data = inputs, (inputs.sum(dim=1) > 0).long()
        >>> teacher = Ensemble([nn.Linear(4, 2) for _ in range(3)])
        >>> network = distill(teacher, lambda: nn.Linear(4, 2), data, num_epochs=2).average_soup

    Args:
        teacher: such as a `papa.Ensemble`, on the device of the training; used in evaluation mode, and not changed.
        make_model: makes the network that is trained.
        data: as for `papa.train`.
        num_epochs: passes over the data.
        task: loss and metric; classification by default.
        weight: the teacher's share of the loss, 0 to 1.
        match: compares outputs with the teacher's; by default `match_probabilities` at a temperature of 2.
        num_members: the number of networks that are trained, independently unless there is a `rule` among the options.
        options: others of `papa.train`.
    """
    options = {"rule": Independent(), **options}
    task = distillation(teacher, Task() if task is None else task, weight=weight, match=match)
    return train(make_model, data, num_epochs=num_epochs, num_members=num_members, task=task, **options)


def distillation(teacher: nn.Module, task: Task, *, weight: float = 0.9, match: Loss | None = None) -> Task:
    """A task whose training loss is that of `distill`; networks are scored as in the given task."""
    if not 0.0 <= weight <= 1.0:
        raise ConfigError(f"the weight of the teacher is {weight}, expected 0 to 1")
    compare = match_probabilities if match is None else match

    def objective(model: Callable[..., Any], inputs: Inputs, targets: Tensor) -> Tensor:
        with torch.no_grad(), evaluating(teacher):
            wanted = outputs_of(teacher, inputs)
        outputs = outputs_of(model, inputs)
        return weight * compare(outputs, wanted) + (1.0 - weight) * task.loss(outputs, targets)

    return replace(task, objective=objective)


def match_probabilities(outputs: Tensor, wanted: Tensor, *, temperature: float = 2.0, dim: int = 1) -> Tensor:
    """The mean Kullback-Leibler divergence of class probabilities from a teacher's, both softened by a temperature.

        T^2 KL(softmax(wanted / T) || softmax(outputs / T))

    Above a temperature of 1, smaller probabilities count more. The factor keeps the size of the gradient. Reference:
    Hinton, Vinyals and Dean, 2015.
    """
    own, goal = (torch.log_softmax(logits / temperature, dim=dim) for logits in (outputs, wanted))
    return temperature**2 * F.kl_div(own, goal, reduction="none", log_target=True).sum(dim).mean()
