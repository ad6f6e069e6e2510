"""From a config to what training takes: settings, optimizers, callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from papa.core.group import Group, LocalGroup
from papa.lab.config import NEVER_AVERAGED, Config
from papa.lab.domains import Domain, load_domain
from papa.lab.models.head import FrozenBody
from papa.lab.probes import MergeProbes
from papa.lab.recipes.rules import rule_for
from papa.lab.selection import CandidateScorer, Mutation
from papa.process import find_device
from papa.training import (
    Align,
    AveragingOptions,
    BestSoup,
    Callback,
    Monitoring,
    Numerics,
    Repair,
    Settings,
    Stacked,
    Training,
    TrajectoryAverage,
    schedules,
)
from papa.training.distillation import distillation, match_probabilities
from papa.training.merge_hooks import merge_hooks_for
from papa.training.options import AlignBy, RepairScope

TEACHER_WEIGHT, TEMPERATURE = 0.9, 2.0
"""The teacher's share of the loss, and what divides the logits of both."""


def build(
    config: Config,
    group: Group | None = None,
    domain: Domain | None = None,
    teacher: nn.Module | None = None,
) -> Training:
    """A training that is ready to run; with a teacher, members are distilled from it."""
    device = (group or LocalGroup()).local_device(find_device(config.device, option="--device"))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where tensors from other processes arrive
    domain = load_domain(config) if domain is None else domain
    settings = settings_for(domain, device)
    if teacher is not None:
        match = partial(match_probabilities, temperature=TEMPERATURE, dim=domain.class_dim)
        task = distillation(teacher.to(device), settings.task, weight=TEACHER_WEIGHT, match=match)
        settings = replace(settings, task=task)
    best = [BestSoup()] if config.average.keep_best_soup else []
    training = Training(
        domain.maker(),
        domain.split(),
        settings,
        callbacks=[*trajectory_averages_for(config), *best],
        group=group,
    )
    average, mutation = config.average, None
    if average.mutation and config.method not in NEVER_AVERAGED:
        every_steps = training.steps_in(average.mutation_every_epochs) if config.method == "papa" else None
        mutation = Mutation(average.mutation, seed=config.seed, every_steps=every_steps)
    rule = rule_for(config, training.length, CandidateScorer(training, mutation))
    outside = [mutation] if mutation is not None else []
    training.use_rule(rule, [*outside, *merge_hooks_for(training, rule)])
    return training


def settings_for(domain: Domain, device: torch.device) -> Settings:
    """The settings of the training that a config describes."""
    config = domain.config
    average = config.average
    return Settings(
        num_members=config.members,
        num_epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        task=domain.task(),
        make_optimizer=partial(make_optimizer, config),
        schedule=make_schedule(config),
        seed=config.seed,
        device=device,
        transforms=domain.transforms(),
        averaging=AveragingOptions(repair=repair_for(config), align=align_for(config)),
        numerics=Numerics(
            autocast={"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.train.precision],
            channels_last=config.train.channels_last,
            clip_norm=config.train.clip_norm,
        ),
        monitoring=Monitoring(
            keep_best_soup=average.keep_best_soup,
            validate_every=config.train.validate_every,
        ),
        engine={"loop": None, "stacked": Stacked}[config.train.engine],
    )


def repair_for(config: Config) -> Repair | None:
    """How members are repaired after merges. Independent members are never merged: their soups are repaired."""
    average = config.average
    own = average.repair_soups if config.method in NEVER_AVERAGED else None
    num_batches = average.repair if own is None else own
    if not num_batches:
        return None
    return Repair(
        num_batches=num_batches,
        own_policies=average.repair_policy == "own",
        scope=cast(RepairScope, average.repair_scope),
    )


def align_for(config: Config) -> Align | None:
    """How members are aligned before they are averaged."""
    average = config.average
    if average.align == "none":
        return None
    return Align(
        by=cast(AlignBy, average.align),
        every_epochs=average.align_every_epochs,
        num_batches=average.align_batches,
    )


def callbacks_for(config: Config, log: Callable[[dict[str, Any]], object]) -> list[Callback]:
    """What the config asks for besides training and averaging."""
    average = config.average
    callbacks: list[Callback] = [FrozenBody(config.model.frozen)] if config.model.frozen else []
    if average.probes:
        callbacks.append(MergeProbes(log, steps_later=average.probe_steps))
    return callbacks


def trajectory_averages_for(config: Config) -> list[Callback]:
    """The average of each member's trajectory, if the config asks for one."""
    trajectory = config.trajectory
    if trajectory.kind == "none":
        return []
    return [TrajectoryAverage(decay=trajectory.decay if trajectory.kind == "ema" else None, start=trajectory.start)]


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer the config asks for."""
    train = config.train
    parameters = model.parameters() if train.decay == "all" else decayed_matrices(model, train.weight_decay)
    if train.optimizer == "adamw":
        betas, fused = (0.9, train.beta2), train.fused or None
        return AdamW(parameters, lr=train.lr, betas=betas, weight_decay=train.weight_decay, fused=fused)
    return SGD(parameters, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay)


def decayed_matrices(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of parameters: those with two or more dimensions, which decay, and the others, which do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]


def make_schedule(config: Config) -> schedules.Schedule:
    """The learning rate schedule the config asks for."""
    train = config.train
    known: dict[str, Callable[[], schedules.Schedule]] = {
        "cosine": lambda: schedules.cosine(train.min_lr / train.lr),
        "multistep": lambda: schedules.multistep(train.milestones),
        "constant": schedules.constant,
    }
    schedule = schedules.warm_up(known[train.schedule](), train.warmup_epochs / train.epochs)
    trajectory = config.trajectory
    if trajectory.kind == "none" or trajectory.lr is None:
        return schedule
    return schedules.then_level(
        schedule,
        start=trajectory.start,
        level=trajectory.lr / train.lr,
        anneal=trajectory.anneal,
        linear=trajectory.linear,
    )
