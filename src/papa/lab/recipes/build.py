"""From a config to what training takes: networks, data, augmentation, optimizers, rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from papa import schedules
from papa.data import Data, split_parts
from papa.distillation import distillation, match_probabilities
from papa.ensemble import mean_logits, mean_probabilities
from papa.errors import ConfigError, did_you_mean
from papa.evaluation import Combine
from papa.group import Group, LocalGroup
from papa.health import OnNonFinite
from papa.lab.augment.policy import (
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
from papa.lab.config import Config
from papa.lab.data import ImageSet, load_images, load_tiles, load_vaihingen
from papa.lab.data.images import LOADERS
from papa.lab.data.text import TextSet
from papa.lab.models import input_size_of, make_model, normalization_of
from papa.lab.models.head import FrozenBody
from papa.lab.probes import MergeProbes
from papa.lab.recipes.couplings import COUPLINGS, coupling_for
from papa.lab.recipes.language import TEXT, language_model_for, language_task_for, text_for
from papa.lab.recipes.pipeline import ImagePipeline
from papa.lab.selection import CandidateScorer, MergeElite, MergeGreedy, MergeTournament, Mutation
from papa.lab.tasks.language import TOKEN_COMBINE
from papa.lab.tasks.segmentation import segmentation
from papa.process import find_device
from papa.rules import Independent, MergeAll, MergeMany, MergePairs, Push, Rule
from papa.streams import global_stream
from papa.task import Task
from papa.training import (
    Align,
    Augment,
    AveragingOptions,
    BestSoup,
    Callback,
    Length,
    Monitoring,
    Numerics,
    Repair,
    Settings,
    Stacked,
    Training,
    TrajectoryAverage,
    Transforms,
)
from papa.training.merge_hooks import merge_hooks_for
from papa.training.options import AlignBy, RepairScope

GRIDS: dict[str, Grid] = {
    "none": PLAIN,
    "default": DEFAULT_GRID,
    "imagenet": IMAGENET_GRID,
    "ablation": ABLATION_GRID,
    "segmentation": SEGMENTATION_GRID,
}

TILES: dict[str, Callable[..., ImageSet]] = {"tiles": load_tiles, "vaihingen": load_vaihingen}
"""Data sets whose every pixel has a class."""


def build(
    config: Config,
    group: Group | None = None,
    images: ImageSet | TextSet | None = None,
    teacher: nn.Module | None = None,
) -> Training:
    """A training that is ready to run; with a teacher, members are distilled from it."""
    config.check()
    device = (group or LocalGroup()).local_device(find_device(config.device, option="--device"))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where tensors from other processes arrive
    images = images_for(config) if images is None else images
    settings = settings_for(config, images, device)
    best = [BestSoup()] if config.average.keep_best_soup else []
    training = Training(
        model_for(config, images),
        data_for(config, images),
        settings if teacher is None else taught(config, settings, teacher),
        callbacks=[*trajectory_averages_for(config), *best],
        group=group,
    )
    mutation = mutation_for(config, training)
    rule = rule_for(config, training.length, CandidateScorer(training, mutation))
    outside = [mutation] if mutation is not None else []
    training.use_rule(rule, [*outside, *merge_hooks_for(training, rule)])
    return training


def taught(config: Config, settings: Settings, teacher: nn.Module) -> Settings:
    """The settings of a training, with the loss of its teacher."""
    match = partial(
        match_probabilities, temperature=config.train.temperature, dim=-1 if config.data.name == TEXT else 1
    )
    teacher = teacher.to(torch.device(settings.device))
    return replace(settings, task=distillation(teacher, settings.task, weight=config.train.teacher_weight, match=match))


def data_for(config: Config, images: ImageSet | TextSet) -> Data:
    """Training, validation and test data, and each member's part of the training data if they differ."""
    data = images.split(config.data.validation, seed=config.seed)
    if config.diversity.parts == "all":
        return data
    parts = split_parts(data.train, config.members, leave_one_out=config.diversity.parts == "folds")
    return replace(data, parts=parts)


def settings_for(config: Config, images: ImageSet | TextSet, device: torch.device) -> Settings:
    """The settings of the training that a config describes."""
    average = config.average
    return Settings(
        num_members=config.members,
        num_epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        accumulate=config.train.accumulate,
        task=task_for(config, images),
        make_optimizer=partial(make_optimizer, config),
        schedule=make_schedule(config),
        seed=config.seed,
        device=device,
        transforms=transforms_for(config, images),
        averaging=AveragingOptions(
            repair=repair_for(config),
            align=align_for(config),
            on_nonfinite=cast(OnNonFinite, average.on_nonfinite),
            measure=average.measure,
        ),
        numerics=numerics_for(config),
        monitoring=Monitoring(keep_best_soup=average.keep_best_soup, test_each_epoch=config.train.test_each_epoch),
        engine=Stacked if config.train.engine == "stacked" else None,
        same_order=config.diversity.same_order,
    )


def transforms_for(config: Config, images: ImageSet | TextSet) -> Transforms:
    """Preparation and augmentation of images; nothing happens to text."""
    if isinstance(images, TextSet):
        return Transforms()
    pipeline = pipeline_for(config, images)
    return Transforms(augment=augments_for(config, pipeline), prepare=pipeline.prepare)


def repair_for(config: Config) -> Repair | None:
    """How members are repaired after merges. Independent members are never merged: their soups are repaired."""
    average = config.average
    own = average.repair_soups if config.method == "independent" else None
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
        move_momentum=average.align_momentum,
    )


def mutation_for(config: Config, training: Training) -> Mutation | None:
    """The noise that members get after averaging, if any."""
    average = config.average
    if not average.mutation or config.method == "independent":
        return None
    every_steps = training.steps_in(average.mutation_every_epochs) if config.method == "papa" else None
    return Mutation(average.mutation, seed=config.seed, every_steps=every_steps)


def callbacks_for(config: Config, log: Callable[[dict[str, Any]], object]) -> list[Callback]:
    """What the config asks for besides training and averaging."""
    average = config.average
    callbacks: list[Callback] = [FrozenBody(config.model.frozen)] if config.model.frozen else []
    if average.probes:
        callbacks.append(MergeProbes(log, steps_later=average.probe_steps, num_examples=average.probe_examples))
    return callbacks


def trajectory_averages_for(config: Config) -> list[Callback]:
    """The average of each member's trajectory, if the config asks for one."""
    trajectory = config.trajectory
    if trajectory.kind == "none":
        return []
    return [TrajectoryAverage(decay=trajectory.decay if trajectory.kind == "ema" else None, start=trajectory.start)]


def images_for(config: Config) -> ImageSet | TextSet:
    """The data set the config asks for."""
    data = config.data
    if data.name == TEXT:
        return text_for(config)
    if data.name in TILES:
        return TILES[data.name](
            data.root,
            patch_size=data.patch_size,
            patches_per_epoch=data.patches_per_epoch,
            shrink=data.shrink,
            max_test=data.max_test,
        )
    if data.name not in LOADERS:
        raise ConfigError(f"--data.name is {data.name}: {did_you_mean(data.name, [*LOADERS, *TILES, TEXT])}")
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


def task_for(config: Config, images: ImageSet | TextSet) -> Task:
    """Language modelling for text, segmentation where every pixel has a class, else classification."""
    if isinstance(images, TextSet):
        return language_task_for(config, images)
    combine = combine_for(config)
    if images.ignore is None:
        return Task(combine=combine)
    data = config.data
    return segmentation(images.classes, ignore=images.ignore, window=data.window, overlap=data.overlap, combine=combine)


def combine_for(config: Config) -> Combine:
    """How the ensemble combines the outputs of members."""
    if config.data.name == TEXT:
        return TOKEN_COMBINE[config.average.ensemble]
    return {"logits": mean_logits, "probabilities": mean_probabilities}[config.average.ensemble]


def wanted_image_size(config: Config) -> int | None:
    """How large images should be: as asked, else as timm's network wants, else None for as they are."""
    if config.data.name in TILES:
        return None
    if config.data.image_size is not None:
        return config.data.image_size
    return input_size_of(config.model.name) if config.model.name.startswith("timm:") else None


def model_for(config: Config, images: ImageSet | TextSet) -> Callable[[], nn.Module]:
    """A function that makes one member."""
    if isinstance(images, TextSet):
        make = language_model_for(config, images.tokenizer.vocab_size)
    else:
        make = image_model_for(config, images)
    return partial(_alike, make, config.seed) if config.diversity.same_init else make


def image_model_for(config: Config, images: ImageSet) -> Callable[[], nn.Module]:
    """A function that makes one network for images."""
    return partial(
        make_model,
        config.model.name,
        num_classes=images.num_classes,
        in_channels=images.channels,
        image_size=wanted_image_size(config) or images.image_size,
        width=config.model.width,
        pretrained=config.model.pretrained and config.model.weights is None,
        weights=config.model.weights,
    )


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


def rule_for(config: Config, length: Length, scorer: CandidateScorer | None = None) -> Rule:
    """The averaging rule of a config, with epochs converted to steps.

    Rules that select members need a `scorer`.
    """
    average = config.average
    start, stop = round(average.start * length.steps_per_epoch), None
    if average.stop is not None:
        stop = round(average.stop * length.steps_per_epoch)
    if config.method in COUPLINGS:
        return coupling_for(config, start=start, stop=stop)
    if config.method == "papa":
        half_life_steps = None if average.half_life is None else average.half_life * length.num_steps
        alpha = PAPER_ALPHA if average.alpha is None and half_life_steps is None else average.alpha
        return Push(
            alpha=alpha,
            half_life_steps=half_life_steps,
            scale_by_lr=average.scale_by_lr,
            every_steps=average.every_steps,
            delay=average.delay,
            start=start,
            stop=stop,
        )
    every_steps = max(1, round(average.every_epochs * length.steps_per_epoch))
    make = _selecting_rule(config, scorer) if scorer is not None else None
    make = make or MERGES[config.method](config)
    return make(every_steps=every_steps, start=start, stop=stop)


PAPER_ALPHA = 0.99

MERGES: dict[str, Callable[[Config], Callable[..., Rule]]] = {
    "independent": lambda config: Independent,
    "papa-all": lambda config: MergeAll,
    "papa-2": lambda config: partial(MergePairs, seed=config.seed),
    "pair-75": lambda config: partial(MergePairs, share=0.75, seed=config.seed),
    "many-half": lambda config: MergeMany,
    "many-75": lambda config: partial(MergeMany, share=0.75),
}
"""The rules that merge, by method."""


def _selecting_rule(config: Config, scorer: CandidateScorer) -> Callable[..., Rule] | None:
    """The rule of a method that selects members by their scores; None for other methods."""
    if config.method == "greedy-merge":
        return partial(MergeGreedy, scorer.greedy_members)
    if config.average.elitist:
        return partial(
            MergeElite,
            scorer.candidate_losses,
            scorer.survivors,
            tournament=config.average.tournament,
            seed=config.seed,
        )
    if config.average.tournament:
        return partial(MergeTournament, scorer.losses, seed=config.seed)
    return None


def numerics_for(config: Config) -> Numerics:
    """Precision, memory format and clipping."""
    dtypes = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return Numerics(
        autocast=dtypes[config.train.precision],
        channels_last=config.train.channels_last,
        clip_norm=config.train.clip_norm,
    )
