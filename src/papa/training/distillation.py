"""Distillation: one network trained to give the outputs of an ensemble, at the cost of one network when it is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papa.core.rules import Independent
from papa.errors import ConfigError, DataError
from papa.evaluation.inputs import Inputs, outputs_of
from papa.evaluation.scores import Batch, Loss, evaluating
from papa.training import Augment, Outcome, Transforms, train
from papa.training.task import Task


def distill(
    teacher: nn.Module,
    make_model: Callable[[], nn.Module],
    data: Any,
    *,
    num_epochs: int,
    task: Task | None = None,
    mix: bool = True,
    weight: float | None = None,
    temperature: float = 1.0,
    match: Loss | None = None,
    num_members: int = 1,
    **options: Any,
) -> Outcome:
    """Train a network to give the outputs of a teacher, on inputs that are mixed in pairs.

        x = a x_1 + (1 - a) x_2,   a uniform on [0, 1],   loss = match(network(x), teacher(x))

    Mixed inputs never run out, so a long training pays: three to five times the epochs of the teacher's members. The
    teacher sees the same input as the network, after augmentation, and targets are not used.

    Example:
        >>> from papa import Ensemble
        >>> inputs = torch.randn(200, 4)
        >>> data = inputs, (inputs.sum(dim=1) > 0).long()
        >>> teacher = Ensemble([nn.Linear(4, 2) for _ in range(3)])
        >>> network = distill(teacher, lambda: nn.Linear(4, 2), data, num_epochs=2).average_soup

    Args:
        teacher: such as a `papa.Ensemble`, on the device of the training; used in evaluation mode, and not changed.
        make_model: makes the network that is trained. To start from a soup: `lambda: copy.deepcopy(soup)`.
        data: as for `papa.train`.
        num_epochs: passes over the data.
        task: loss and metric; classification by default.
        mix: mix the inputs of a batch in pairs, each pair in its own proportion. False for inputs that cannot be mixed,
            such as tokens.
        weight: the teacher's share of the loss, 0 to 1; the rest is the task's loss of the targets. Always 1 if inputs
            are mixed, otherwise 0.9 by default.
        temperature: of the default `match`; above 1, small probabilities count more.
        match: compares outputs with the teacher's; `match_probabilities` by default.
        num_members: the number of networks that are trained, independently unless there is a `rule` among the options.
        options: others of `papa.train`.
    """
    options = {"rule": Independent(), **options}
    if mix:
        if weight not in (None, 1.0):
            raise ConfigError(
                f"the weight of the teacher is {weight}, but mixed inputs have no targets: pass mix=False"
            )
        weight, options["transforms"] = 1.0, mixed(options.get("transforms", Transforms()))
    weight = 0.9 if weight is None else weight
    match = functools.partial(match_probabilities, temperature=temperature) if match is None else match
    task = distillation(teacher, Task() if task is None else task, weight=weight, match=match)
    return train(make_model, data, num_epochs=num_epochs, num_members=num_members, task=task, **options)


def mixed(transforms: Transforms) -> Transforms:
    """Transforms after which the inputs of a training batch are mixed by `mix_pairs`."""

    def then_mix(augment: Augment | None) -> Augment:
        def augment_and_mix(inputs: Inputs, targets: Tensor, generator: torch.Generator) -> Batch:
            if augment is None:
                inputs = transforms.prepare(inputs)
            else:
                inputs, targets = augment(inputs, targets, generator)
            return mix_pairs(inputs, generator), targets

        return augment_and_mix

    augment = transforms.augment
    if augment is None or callable(augment):
        return replace(transforms, augment=then_mix(augment))
    return replace(transforms, augment=[then_mix(one) for one in augment])


def mix_pairs(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Each input mixed with another one of the batch, in a proportion of its own that is uniform on [0, 1].

    Example:
        >>> mix_pairs(torch.tensor([[0.0], [1.0]]), torch.Generator()).shape
        torch.Size([2, 1])
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        kind = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(f"inputs to mix are {kind}, expected a tensor of floating-point numbers: pass mix=False")
    partners = torch.randperm(len(inputs), generator=generator, device=generator.device).to(inputs.device)
    shares = torch.rand(len(inputs), generator=generator, device=generator.device).to(inputs)
    return torch.lerp(inputs[partners], inputs, shares.view(-1, *[1] * (inputs.dim() - 1)))


def distillation(teacher: nn.Module, task: Task, *, weight: float, match: Loss) -> Task:
    """A task whose training loss is that of `distill`; networks are scored as in the given task."""
    if not 0.0 <= weight <= 1.0:
        raise ConfigError(f"the weight of the teacher is {weight}, expected 0 to 1")

    def objective(model: Callable[..., Any], inputs: Inputs, targets: Tensor) -> Tensor:
        with torch.no_grad(), evaluating(teacher):
            wanted = outputs_of(teacher, inputs)
        outputs = outputs_of(model, inputs)
        loss = match(outputs, wanted)
        return loss if weight == 1.0 else weight * loss + (1.0 - weight) * task.loss(outputs, targets)

    return replace(task, objective=objective)


def match_probabilities(outputs: Tensor, wanted: Tensor, *, temperature: float = 1.0, dim: int = 1) -> Tensor:
    """The mean Kullback-Leibler divergence of class probabilities from a teacher's, both softened by a temperature.

        T^2 KL(softmax(wanted / T) || softmax(outputs / T))

    Above a temperature of 1, smaller probabilities count more. The factor keeps the size of the gradient. Reference:
    Hinton, Vinyals and Dean, 2015.
    """
    own, goal = (torch.log_softmax(logits / temperature, dim=dim) for logits in (outputs, wanted))
    return temperature**2 * F.kl_div(own, goal, reduction="none", log_target=True).sum(dim).mean()
