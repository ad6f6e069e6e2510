"""`papa.train`: your data, model and loss; our loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer

from papa.evaluation import Apply, Loss, Metric, accuracy, call
from papa.inputs import Inputs
from papa.process import find_device
from papa.rules import Rule
from papa.schedules import Schedule, cosine
from papa.training.batches import Augment
from papa.training.loop import Callback, Companion, Training
from papa.training.merge_options import MergeOptions
from papa.training.options import Engine, Numerics
from papa.training.outcome import Outcome, finalize
from papa.training.saving import kept


def sgd(model: nn.Module) -> Optimizer:
    """SGD as the paper trains its CIFAR networks: lr 0.1, momentum 0.9, weight decay 1e-4."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def unchanged(inputs: Inputs) -> Inputs:
    """The inputs as they are."""
    return inputs


def train(
    make_model: Callable[[], nn.Module],
    data: Any,
    *,
    num_members: int = 5,
    num_epochs: int,
    batch_size: int = 64,
    validation: float = 0.02,
    rule: Rule | Callable[[Training], Rule] | None = None,
    loss: Loss = F.cross_entropy,
    metric: Metric = accuracy,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    schedule: Schedule = cosine(),  # noqa: B008
    augment: Augment | Sequence[Augment] | None = None,
    prepare: Callable[[Inputs], Inputs] = unchanged,
    seed: int = 1,
    device: torch.device | str = "auto",
    numerics: Numerics = Numerics(),  # noqa: B008
    eval_batch_size: int = 512,
    num_repair_batches: int = 0,
    on_nonfinite: str | None = "restart",
    apply: Apply = call,
    merging: MergeOptions = MergeOptions(),  # noqa: B008
    engine: Callable[[Training], Engine] | None = None,
    companion: Companion | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: str | Path | None = None,
) -> Outcome:
    """Train a population and hand back its soups and scores.

    Each member has its own initial weights and its own order of the data, both functions of (seed, member) alone.

    Example:
        >>> inputs = torch.randn(200, 4)
        >>> targets = (inputs.sum(dim=1) > 0).long()
        >>> outcome = train(lambda: nn.Linear(4, 2), (inputs, targets), num_members=3, num_epochs=2, batch_size=20)
        >>> network = outcome.average_soup

    Args:
        make_model: makes one member; called once for each, with torch's generators seeded for it.
        data: a pair of tensors (inputs, targets) or a torch dataset, of which a share is held out for the greedy soup
            (through the same transforms); or a `papa.data.Data` that names training, validation and test data. Inputs
            may be several tensors by name, `{"words": ..., "mask": ...}`, which a network takes by keyword, where its
            `forward` has these names, or as its one argument.
        num_members: the size of the population.
        num_epochs: passes over the data.
        batch_size: examples per step; the last incomplete batch of an epoch is left out.
        validation: the share held out, where `data` names no validation data.
        rule: how members are averaged, or a function that makes it of the training, whose `length` it may look at. By
            default a `Push` whose half-life is 0.3% of training.
        loss: from outputs and targets to the mean loss of a batch.
        metric: from outputs and targets to the mean score of a batch, or counts that add up over batches, as
            `papa.lab.tasks.F1`; higher is better.
        make_optimizer: makes one member's optimizer from the member.
        schedule: the learning rate as a share of the optimizer's, from steps taken and steps in all.
        augment: from a batch of raw inputs, its targets and a generator to what a member trains on; one for all, or
            one for each member. It replaces `prepare` during training.
        prepare: from a batch of raw inputs to what a network takes, with nothing random in it.
        seed: where every random stream starts.
        device: where to train; `auto` is an accelerator where there is one.
        numerics: precision, memory format, gradient clipping.
        eval_batch_size: examples per batch when scoring.
        num_repair_batches: repair members after each merge (REPAIR), by their statistics on so many batches; 0 for not.
        on_nonfinite: what to do with a member whose weights, or loss for three steps, are not finite: `restart`, `drop` or
            `stop`, see `Averager`; None not to look.
        apply: how a network gives its outputs when it is scored, such as `papa.lab.tasks.apply_whole`.
        merging: how they are repaired.
        engine: how all members take a step; None for one after the other, `papa.training.Stacked` for all at once.
        companion: what goes along with each member, such as `papa.training.TrajectoryAverage` (SWA, EMA).
        callbacks: `papa.training.Callback`s, told of every step, averaging and epoch.
        checkpoints: a directory for this training alone. Its whole state is saved there at the end of each epoch and
            every ten minutes, and the same call made again goes on from there, to the same bits; once done, it returns
            the same outcome. None for not.

    Returns:
        The population, its average and greedy soups in evaluation mode, and their scores.
    """
    training = Training(
        make_model,
        data,
        num_members=num_members,
        num_epochs=num_epochs,
        batch_size=batch_size,
        validation=validation,
        rule=rule,
        loss=loss,
        metric=metric,
        make_optimizer=make_optimizer,
        schedule=schedule,
        augment=augment,
        prepare=prepare,
        seed=seed,
        device=find_device(device),
        numerics=numerics,
        eval_batch_size=eval_batch_size,
        num_repair_batches=num_repair_batches,
        on_nonfinite=on_nonfinite,
        apply=apply,
        merging=merging,
        engine=engine,
        companion=companion,
        group=None,
    )
    if checkpoints is None:
        training.run(callbacks)
    else:
        with kept(training, Path(checkpoints)) as saver:
            training.run([*callbacks, saver])
            saver.finish(training)
    return finalize(training)
