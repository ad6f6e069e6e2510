"""From a config to what training takes: networks, data, augmentation, optimizers, rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from papa import schedules
from papa.errors import ConfigError, did_you_mean
from papa.group import Group, LocalGroup
from papa.lab.augment import (
    ABLATION_GRID,
    DART_POLICIES,
    DEFAULT_GRID,
    IMAGENET_GRID,
    PLAIN,
    SEGMENTATION_GRID,
    Grid,
    Policy,
    draw_policies,
    draw_policy_per_batch,
)
from papa.lab.candidates import CandidateScorer
from papa.lab.config import Config
from papa.lab.data import ImageSet, load_images, load_tiles, load_vaihingen
from papa.lab.data.images import LOADERS
from papa.lab.models import input_size_of, make_model, normalization_of
from papa.lab.recipes.pipeline import ImagePipeline
from papa.lab.selection import MergeElite, MergeGreedy, MergeTournament
from papa.lab.tasks import classification, segmentation
from papa.process import find_device
from papa.rules import Independent, MergeAll, MergeMany, MergePairs, Push, Rule
from papa.streams import global_stream
from papa.task import Task
from papa.training import (
    Augment,
    Callback,
    FrozenBody,
    Length,
    MergeOptions,
    MergeProbes,
    Numerics,
    Stacked,
    Training,
    TrajectoryAverage,
)

GRIDS: dict[str, Grid] = {
    "none": PLAIN,
    "default": DEFAULT_GRID,
    "imagenet": IMAGENET_GRID,
    "ablation": ABLATION_GRID,
    "segmentation": SEGMENTATION_GRID,
}

TILES: dict[str, Callable[..., ImageSet]] = {"tiles": load_tiles, "vaihingen": load_vaihingen}
"""Data sets whose every pixel has a class."""


def build(config: Config, group: Group | None = None, images: ImageSet | None = None) -> Training:
    """A training that is ready to run.

    Args:
        config: what to train; checked first.
        group: the processes that hold the population; None for this one alone.
        images: what `images_for` gives, where it is there already.
    """
    config.check()
    device = (group or LocalGroup()).place(find_device(config.device, option="--device"))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where what other processes send arrives
    images = images_for(config) if images is None else images
    pipeline = pipeline_for(config, images)
    task = task_for(config, images)
    return Training(
        model_for(config, images),
        images.split(config.data.validation, seed=config.seed),
        num_members=config.members,
        num_epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        rule=lambda training: rule_for(config, training.length, partial(CandidateScorer, training)),
        loss=task.loss,
        metric=task.metric,
        make_optimizer=partial(make_optimizer, config),
        schedule=make_schedule(config),
        augment=augments_for(config, pipeline),
        prepare=pipeline.prepare,
        seed=config.seed,
        device=device,
        numerics=numerics_for(config),
        eval_batch_size=task.eval_batch_size,
        num_repair_batches=_num_repair_batches(config),
        on_nonfinite=config.average.on_nonfinite,
        apply=task.apply,
        merging=merging_for(config),
        engine=Stacked if config.train.engine == "stacked" else None,
        measure=config.average.measure,
        companion=companion_for(config),
        group=group,
    )


def _num_repair_batches(config: Config) -> int:
    """Independent members are never merged: what is repaired are their soups."""
    own = config.average.repair_soups if config.method == "independent" else None
    return config.average.repair if own is None else own


def callbacks_for(config: Config, log: Callable[[dict[str, Any]], object]) -> list[Callback]:
    """What the config wants to happen besides training and averaging.

    Args:
        config: what is trained.
        log: takes a line of metrics.
    """
    average = config.average
    callbacks: list[Callback] = [FrozenBody(config.model.frozen)] if config.model.frozen else []
    if average.probes:
        callbacks.append(MergeProbes(log, steps_later=average.probe_steps, num_examples=average.probe_examples))
    return callbacks


def merging_for(config: Config) -> MergeOptions:
    """How members are matched before they are averaged, and repaired after merges."""
    average = config.average
    return MergeOptions(
        own_policies=average.repair_policy == "own",
        batch_norm_only=average.repair_scope == "batch-norm",
        align=None if average.align == "none" else average.align,
        align_every_epochs=average.align_every_epochs,
        num_align_batches=average.align_batches,
        mutation=average.mutation,
        mutation_every_epochs=average.mutation_every_epochs,
    )


def companion_for(config: Config) -> TrajectoryAverage | None:
    """What goes along with each member: an average of its trajectory, where asked for."""
    trajectory = config.trajectory
    if trajectory.kind == "none":
        return None
    return TrajectoryAverage(decay=trajectory.decay if trajectory.kind == "ema" else None, start=trajectory.start)


def sizes(config: Config) -> tuple[int, int]:
    """The number of parameters of a member, and of training examples: pixels, where each of them has a class."""
    images = images_for(config)
    untrained = replace(config, model=replace(config.model, pretrained=False, weights=None))
    model = model_for(untrained, images)()
    pixels = 1 if images.ignore is None else images.image_size**2
    return sum(parameter.numel() for parameter in model.parameters()), len(images.train) * pixels


def images_for(config: Config) -> ImageSet:
    """The data set the config asks for."""
    data = config.data
    if data.name in TILES:
        return TILES[data.name](
            data.root,
            patch_size=data.patch_size,
            patches_per_epoch=data.patches_per_epoch,
            shrink=data.shrink,
            max_test=data.max_test,
        )
    if data.name not in LOADERS:
        raise ConfigError(f"--data.name is {data.name}: {did_you_mean(data.name, [*LOADERS, *TILES])}")
    # Small images are resized a batch at a time on their way into the network; photographs when they are decoded.
    size = wanted_image_size(config) if data.name in ("folder", "imagenet") else None
    return load_images(
        data.name,
        root=data.root,
        image_size=size,
        max_train=data.max_train,
        max_test=data.max_test,
        test_share=data.test_share,
    )


def task_for(config: Config, images: ImageSet) -> Task:
    """Segmentation where every pixel has a class, else classification."""
    if images.ignore is None:
        return classification()
    data = config.data
    return segmentation(images.classes, ignore=images.ignore, window=data.window, overlap=data.overlap)


def wanted_image_size(config: Config) -> int | None:
    """How large images should be: as asked, else as timm's network wants, else None for as they are."""
    if config.data.name in TILES:
        return None
    if config.data.image_size is not None:
        return config.data.image_size
    return input_size_of(config.model.name) if config.model.name.startswith("timm:") else None


def model_for(config: Config, images: ImageSet) -> Callable[[], nn.Module]:
    """A function that makes one member."""
    make = partial(
        make_model,
        config.model.name,
        num_classes=images.num_classes,
        in_channels=images.channels,
        image_size=wanted_image_size(config) or images.image_size,
        width=config.model.width,
        pretrained=config.model.pretrained and config.model.weights is None,
        weights=config.model.weights,
    )
    return partial(_alike, make, config.seed) if config.diversity.same_init else make


def _alike(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The first member, whoever asks."""
    with global_stream(seed, "init", 0):
        return make()


def pipeline_for(config: Config, images: ImageSet) -> ImagePipeline:
    """What happens to images on their way into the network."""
    mean, std = normalization_of(config.model.name) or (images.mean, images.std)
    size = wanted_image_size(config) or images.image_size
    return ImagePipeline(
        num_classes=images.num_classes,
        mean=mean,
        std=std,
        crop_padding=images.crop_padding,
        flip=images.flip,
        resize=None if size == images.image_size else size,
        ignore=images.ignore,
    )


def augments_for(config: Config, pipeline: ImagePipeline) -> list[Augment] | None:
    """Each member's way from raw images to what it trains on; None where nothing happens but `prepare`."""
    if not pipeline.draws and config.diversity.grid != "dart" and grid_for(config) == PLAIN:
        return None
    if config.diversity.per_batch:
        drawn = partial(draw_policy_per_batch, grid_for(config))
        return [partial(pipeline.augment, policy=drawn)] * config.members
    return [partial(pipeline.augment, policy=policy) for policy in policies_for(config)]


def policies_for(config: Config) -> tuple[Policy, ...]:
    """Each member's augmentation and regularisation, drawn from the grid; none where every batch draws its own."""
    if config.diversity.per_batch:
        return ()
    if config.diversity.grid == "dart":
        return tuple(DART_POLICIES[member % len(DART_POLICIES)] for member in range(config.members))
    return draw_policies(grid_for(config), config.members, seed=config.seed)


def grid_for(config: Config) -> Grid:
    """The grid the config names."""
    name = config.diversity.grid
    if name not in GRIDS:
        raise ConfigError(f"--diversity.grid is {name}: {did_you_mean(name, [*GRIDS, 'dart'])}")
    return GRIDS[name]


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer the config asks for."""
    train = config.train
    if train.optimizer == "adamw":
        return AdamW(model.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    return SGD(model.parameters(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay)


def make_schedule(config: Config) -> schedules.Schedule:
    """The learning rate schedule the config asks for."""
    train = config.train
    known: dict[str, Callable[[], schedules.Schedule]] = {
        "cosine": lambda: schedules.cosine(train.min_lr / train.lr),
        "restarts": lambda: schedules.cosine_restarts(train.cycles, train.min_lr / train.lr),
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


def rule_for(config: Config, length: Length, scorer: Callable[[], CandidateScorer] | None = None) -> Rule:
    """The averaging rule the config asks for, its epochs turned into steps.

    Args:
        config: what is trained.
        length: how long.
        scorer: makes what rules that select ask; needed by those alone.
    """
    average = config.average
    start, stop = round(average.start * length.steps_per_epoch), None
    if average.stop is not None:
        stop = round(average.stop * length.steps_per_epoch)
    if config.method == "papa":
        strength: dict[str, float] = {}
        if average.alpha is not None:
            strength["alpha"] = average.alpha
        elif average.half_life is not None:
            strength["half_life"] = average.half_life * length.num_steps
        return Push(
            alpha=strength.get("alpha"),
            half_life=strength.get("half_life"),
            scale_by_lr=average.scale_by_lr,
            every_steps=average.every_steps,
            delay=average.delay,
            start=start,
            stop=stop,
        )
    every_steps = max(1, round(average.every_epochs * length.steps_per_epoch))
    if scorer is not None and (config.method == "greedy-merge" or average.tournament or average.elitist):
        rule = _selecting_rule(config, scorer())
        return replace(rule, every_steps=every_steps, start=start, stop=stop)
    merges: dict[str, Callable[..., Rule]] = {
        "independent": Independent,
        "papa-all": MergeAll,
        "papa-2": partial(MergePairs, seed=config.seed),
        "pair-75": partial(MergePairs, share=0.75, seed=config.seed),
        "many-half": MergeMany,
        "many-75": partial(MergeMany, share=0.75),
    }
    return merges[config.method](every_steps=every_steps, start=start, stop=stop)


def _selecting_rule(config: Config, scorer: CandidateScorer) -> Rule:
    if config.method == "greedy-merge":
        return MergeGreedy(scorer.greedy_members)
    if config.average.elitist:
        return MergeElite(
            scorer.candidate_losses, scorer.survivors, tournament=config.average.tournament, seed=config.seed
        )
    return MergeTournament(scorer.losses, seed=config.seed)


def numerics_for(config: Config) -> Numerics:
    """Precision, memory format and clipping."""
    dtypes = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return Numerics(
        autocast=dtypes[config.train.precision],
        channels_last=config.train.channels_last,
        clip_norm=config.train.clip_norm,
    )
