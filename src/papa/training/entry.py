"""`papa.train`: train a population with your model, data and loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from papa.core.half_life import default_half_life
from papa.core.rules import Push, Rule
from papa.core.soups import warn_if_far_worse
from papa.errors import ConfigError
from papa.evaluation.classification import accuracy
from papa.evaluation.scores import Loss, Metric
from papa.training.callbacks import Callback
from papa.training.checks import check_callbacks, check_rule
from papa.training.data import Data
from papa.training.loop import Training
from papa.training.merge_hooks import merge_hooks_for
from papa.training.options import AveragingOptions, Engine, Length, Monitoring, Numerics, Settings, Transforms, sgd
from papa.training.outcome import BestSoup, Outcome, finalize
from papa.training.progress import progress_for
from papa.training.saving import CheckpointOptions, run_saved
from papa.training.schedules import MakeScheduler, Schedule, cosine
from papa.training.task import Task, own_loss


def train(
    make_model: Callable[[], nn.Module],
    data: Any,
    *,
    num_epochs: int,
    num_members: int = 5,
    batch_size: int | None = None,
    accumulate: int = 1,
    steps_per_epoch: int | None = None,
    validation: Any = 0.02,
    rule: Rule | Callable[[Training], Rule] | None = None,
    loss: Loss = own_loss,
    metric: Metric = accuracy,
    task: Task | None = None,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    schedule: Schedule = cosine(),  # noqa: B008
    make_scheduler: MakeScheduler | None = None,
    seed: int = 1,
    device: torch.device | str = "auto",
    transforms: Transforms = Transforms(),  # noqa: B008
    averaging: AveragingOptions = AveragingOptions(),  # noqa: B008
    numerics: Numerics = Numerics(),  # noqa: B008
    monitoring: Monitoring = Monitoring(),  # noqa: B008
    engine: Callable[[Training], Engine] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: str | Path | CheckpointOptions | None = None,
    verbose: bool | None = None,
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
        data: a pair of tensors (inputs, targets), a torch dataset or a `DataLoader`, of which a share is held out for
            validation (through the same transforms); or a `papa.training.data.Data` with training, validation and test
            data. Of a loader, the batch size, collate function and workers are used, and its sampler if it has one of
            its own. An example is a pair, a longer tuple whose last entry is the target, or a dictionary with `labels`.
            Inputs by name are passed by keyword if the network's `forward` has these names, or else as one argument.
        num_epochs: passes over the data.
        num_members: the size of the population.
        batch_size: examples per batch, by default those of the loader, or 64; the last incomplete batch of an epoch is
            left out.
        accumulate: batches per optimizer step, whose gradients are averaged.
        steps_per_epoch: for loaders without a length, the optimizer steps to call an epoch.
        validation: the share of the data held out for validation; or validation data of its own, in any form that
            `data` may have. Not used if `data` is a `papa.training.data.Data`.
        rule: how members are averaged, or a function from the `Training` to that. By default a `Push` with a half-life
            of 1% of training up to 10,000 steps, and of 0.3% of longer ones; `papa.AdaptivePush()` sets its own, by
            losses on training batches.
        loss: from outputs and targets to the mean loss of a batch. By default the network's own, if it takes labels
            and returns outputs with a `loss`, as those of transformers; else the cross-entropy. Of outputs with
            `logits`, these are used.
        metric: from outputs and targets to the mean score of a batch, or an object that counts over batches; higher is
            better.
        task: replaces `loss` and `metric`: for scores that are better when lower, for ensembles of probabilities, and
            for networks that are applied in their own way when they are scored.
        make_optimizer: from a member to its optimizer.
        schedule: from steps taken and the number of steps to the learning rate as a share of the optimizer's.
        make_scheduler: instead of `schedule`, from an optimizer and the number of steps to a PyTorch scheduler:
            `lambda optimizer, num_steps: OneCycleLR(optimizer, 0.1, total_steps=num_steps)`.
        seed: the seed of every random stream.
        device: where to train; `auto` is an accelerator if there is one.
        transforms: augmentation and preparation of inputs.
        averaging: REPAIR, alignment, non-finite members.
        numerics: precision, memory format, gradient clipping.
        monitoring: keep the best soup; score test data after every epoch.
        engine: how members take a step: None for one after the other, `papa.training.Stacked` for all at once, which is
            faster for tiny networks.
        callbacks: see `papa.training.Callback`.
        checkpoints: a directory for this training alone, or `CheckpointOptions`. The state is saved there after each
            epoch, every ten minutes and after Ctrl-C; the same call continues from there, to the same bits, and once
            training is finished returns the same outcome, or goes on if it asks for more epochs. None to save nothing.
        verbose: show progress on standard error; None to do so in a terminal and in a notebook.

    Returns:
        The population, its average and greedy soups in evaluation mode, and their scores.
    """
    check_rule(rule)
    check_callbacks(callbacks, Callback)
    settings = Settings(
        num_epochs=num_epochs,
        num_members=num_members,
        batch_size=batch_size_for(data, batch_size),
        accumulate=accumulate,
        steps_per_epoch=steps_per_epoch,
        make_scheduler=make_scheduler,
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
    progress = progress_for(verbose)
    training = start_training(make_model, data, settings, rule, callbacks=[*callbacks, *progress])
    if checkpoints is None:
        training.run()
    else:
        options = checkpoints if isinstance(checkpoints, CheckpointOptions) else CheckpointOptions(checkpoints)
        run_saved(training, options)
    outcome = finalize(training)
    if training.averager.rule.averages:
        scores = outcome.validation
        is_higher_better = training.task.higher_is_better
        warn_if_far_worse(scores.average_soup.score, scores.counted, higher_is_better=is_higher_better)
    if progress and outcome.verdict is not None:
        sys.stderr.write(f"papa: {outcome.verdict}\n")
    return outcome


def batch_size_for(data: Any, batch_size: int | None) -> int:
    """The number of examples per batch, from the loader if there is one."""
    loader = data.train if isinstance(data, Data) else data
    own = loader.batch_size if isinstance(loader, DataLoader) else None
    if own is not None and batch_size is not None and own != batch_size:
        raise ConfigError(f"batch_size is {batch_size}, but the loader's is {own}: leave one of them out")
    return own or (64 if batch_size is None else batch_size)


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
    """A push with a half-life of `default_half_life` of training, at least a step."""
    return Push(half_life_steps=max(1.0, default_half_life(length.num_steps) * length.num_steps))
