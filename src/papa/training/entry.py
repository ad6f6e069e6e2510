"""`papa.train`: train a population with your model, data and loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from papa.evaluation import Loss, Metric, accuracy
from papa.rules import HALF_LIFE, Push, Rule
from papa.schedules import Schedule, cosine
from papa.soup import warn_if_far_worse
from papa.task import Task
from papa.training.best_soup import BestSoup
from papa.training.callbacks import Callback
from papa.training.checks import check_callbacks, check_rule
from papa.training.loop import Training
from papa.training.merge_hooks import merge_hooks_for
from papa.training.options import AveragingOptions, Engine, Length, Monitoring, Numerics, Settings, Transforms, sgd
from papa.training.outcome import Outcome, finalize
from papa.training.saving import CheckpointOptions, saved


def train(
    make_model: Callable[[], nn.Module],
    data: Any,
    *,
    num_epochs: int,
    num_members: int = 5,
    batch_size: int = 64,
    accumulate: int = 1,
    validation: float = 0.02,
    rule: Rule | Callable[[Training], Rule] | None = None,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    task: Task | None = None,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    schedule: Schedule = cosine(),  # noqa: B008
    seed: int = 1,
    device: torch.device | str = "auto",
    transforms: Transforms = Transforms(),  # noqa: B008
    averaging: AveragingOptions = AveragingOptions(),  # noqa: B008
    numerics: Numerics = Numerics(),  # noqa: B008
    monitoring: Monitoring = Monitoring(),  # noqa: B008
    engine: Callable[[Training], Engine] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: str | Path | CheckpointOptions | None = None,
) -> Outcome:
    """Train a population and return its soups and scores.

    Each member has its own initial weights and its own order of the data, both functions of seed and member only.

    Example:
        >>> inputs = torch.randn(200, 4)
        >>> targets = (inputs.sum(dim=1) > 0).long()
        >>> outcome = train(lambda: nn.Linear(4, 2), (inputs, targets), num_members=3, num_epochs=2, batch_size=20)
        >>> network = outcome.average_soup

    Args:
        make_model: makes one member; called once for each, with torch's generators seeded for it.
        data: a pair of tensors (inputs, targets) or a torch dataset, of which a share is held out for validation
            (through the same transforms); or a `papa.data.Data` with training, validation and test data. Inputs may be
            several tensors by name, `{"words": ..., "mask": ...}`, which a network takes by keyword if its `forward`
            has these names, or else as its one argument.
        num_epochs: passes over the data.
        num_members: the size of the population.
        batch_size: examples per batch; the last incomplete batch of an epoch is left out.
        accumulate: batches per optimizer step, whose gradients are averaged.
        validation: the share of the data held out for validation, if `data` names no validation data.
        rule: how members are averaged, or a function from the `Training` to that. By default a `Push` with a half-life
            of 0.3% of training.
        loss: from outputs and targets to the mean loss of a batch.
        metric: from outputs and targets to the mean score of a batch, or an object that counts over batches; higher is
            better.
        task: replaces `loss` and `metric`: for scores that are better when lower, for ensembles of probabilities, and
            for networks that are applied in their own way when they are scored.
        make_optimizer: from a member to its optimizer.
        schedule: from steps taken and the number of steps to the learning rate as a share of the optimizer's.
        seed: the seed of every random stream.
        device: where to train; `auto` is an accelerator if there is one.
        transforms: augmentation and preparation of inputs.
        averaging: REPAIR, alignment, non-finite members.
        numerics: precision, memory format, gradient clipping.
        monitoring: keep the best soup; score test data after every epoch.
        engine: how members take a step: None for one after the other, `papa.training.Stacked` for all at once.
        callbacks: see `papa.training.Callback`.
        checkpoints: a directory for this training alone, or `CheckpointOptions`. The state is saved there after each
            epoch and every ten minutes; the same call continues from there, to the same bits, and once training is
            finished returns the same outcome. None to save nothing.

    Returns:
        The population, its average and greedy soups in evaluation mode, and their scores.
    """
    check_rule(rule)
    check_callbacks(callbacks, Callback)
    settings = Settings(
        num_epochs=num_epochs,
        num_members=num_members,
        batch_size=batch_size,
        accumulate=accumulate,
        task=Task(loss=loss, metric=metric) if task is None else task,
        make_optimizer=make_optimizer,
        schedule=schedule,
        seed=seed,
        device=device,
        validation=validation,
        transforms=transforms,
        averaging=averaging,
        numerics=numerics,
        monitoring=monitoring,
        engine=engine,
    )
    training = start_training(make_model, data, settings, rule, callbacks=callbacks)
    if checkpoints is None:
        training.run()
    else:
        options = checkpoints if isinstance(checkpoints, CheckpointOptions) else CheckpointOptions(checkpoints)
        with saved(training, options) as saver:
            training.run([saver])
            saver.finish(training)
    outcome = finalize(training)
    if training.averager.rule.averages:
        scores = outcome.validation
        is_higher_better = training.task.higher_is_better
        warn_if_far_worse(scores.average_soup.score, scores.counted, higher_is_better=is_higher_better)
    return outcome


def start_training(
    make_model: Callable[[], nn.Module],
    data: Any,
    settings: Settings,
    rule: Rule | Callable[[Training], Rule] | None,
    *,
    callbacks: Sequence[Callback] = (),
    group: Any = None,
) -> Training:
    """A training with its rule and merge hooks, ready to run."""
    best = [BestSoup()] if settings.monitoring.keep_best_soup else []
    training = Training(make_model, data, settings, callbacks=[*callbacks, *best], group=group)
    if rule is None:
        rule = default_push(training.length)
    elif not isinstance(rule, Rule):
        rule = rule(training)
    training.use_rule(rule, merge_hooks_for(training, rule))
    return training


def default_push(length: Length) -> Push:
    """A push with a half-life of `HALF_LIFE` of training, at least a step."""
    return Push(half_life_steps=max(1.0, HALF_LIFE * length.num_steps))
