"""From a config to what training takes: networks, data, augmentation, optimizers, rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from papa import schedules
from papa.augment import (
    ABLATION_GRID,
    DEFAULT_GRID,
    IMAGENET_GRID,
    PLAIN,
    Grid,
    Policy,
    draw_policies,
    normalize,
    random_crop,
    random_flip,
)
from papa.config import Config
from papa.data.images import ImageSet, load_images
from papa.errors import ConfigError, did_you_mean
from papa.evaluate import Batch, accuracy
from papa.group import Group
from papa.models import make_model
from papa.rules import Independent, MergeAll, MergeMany, MergePairs, Push, Rule
from papa.training import Length, Numerics, Training

GRIDS: dict[str, Grid] = {
    "none": PLAIN,
    "default": DEFAULT_GRID,
    "imagenet": IMAGENET_GRID,
    "ablation": ABLATION_GRID,
}


def build(config: Config, group: Group | None = None) -> Training:
    """A training that is ready to run.

    Args:
        config: what to train; checked first.
        group: the processes that hold the population; None for this one alone.
    """
    config.check()
    images = load_images(config.data.name)
    prepare = partial(normalize, mean=images.mean, std=images.std)
    return Training(
        _make_model(config, images),
        images.split(config.data.validation, seed=config.seed),
        num_members=config.members,
        num_epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        rule=partial(rule_for, config),
        loss=nn.functional.cross_entropy,
        metric=accuracy,
        make_optimizer=partial(make_optimizer, config),
        schedule=make_schedule(config),
        augment=[partial(augment_images, images=images, policy=policy) for policy in policies_for(config)],
        prepare=prepare,
        seed=config.seed,
        device=find_device(config.device),
        numerics=numerics_for(config),
        eval_batch_size=512,
        group=group,
    )


def sizes(config: Config) -> tuple[int, int]:
    """The number of parameters of a member, and of training examples."""
    images = load_images(config.data.name)
    model = _make_model(config, images)()
    return sum(parameter.numel() for parameter in model.parameters()), len(images.train)


def _make_model(config: Config, images: ImageSet) -> Callable[[], nn.Module]:
    return partial(
        make_model,
        config.model.name,
        num_classes=images.num_classes,
        in_channels=images.channels,
        image_size=images.image_size,
        width=config.model.width,
    )


def policies_for(config: Config) -> tuple[Policy, ...]:
    """Each member's augmentation and regularisation, drawn from the grid."""
    if config.diversity.grid not in GRIDS:
        raise ConfigError(f"--diversity.grid is {config.diversity.grid}: {did_you_mean(config.diversity.grid, GRIDS)}")
    return draw_policies(GRIDS[config.diversity.grid], config.members, seed=config.seed)


def augment_images(
    inputs: Tensor, targets: Tensor, generator: torch.Generator, *, images: ImageSet, policy: Policy
) -> Batch:
    """What happens to a member's batch: shift and mirror, then its policy around the normalisation."""
    shifted = random_crop(inputs, padding=images.crop_padding, generator=generator)
    if images.flip:
        shifted = random_flip(shifted, generator=generator)
    normalized = normalize(policy.on_images(shifted, generator), mean=images.mean, std=images.std)
    return policy.on_batch(normalized, targets, num_classes=images.num_classes, generator=generator)


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
        "multistep": lambda: schedules.multistep(train.milestones),
        "constant": schedules.constant,
    }
    return schedules.warm_up(known[train.schedule](), train.warmup_epochs / train.epochs)


def rule_for(config: Config, length: Length) -> Rule:
    """The averaging rule the config asks for, its epochs turned into steps."""
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
            **strength, scale_by_lr=average.scale_by_lr, every_steps=average.every_steps, start=start, stop=stop
        )
    every_steps = max(1, round(average.every_epochs * length.steps_per_epoch))
    merges: dict[str, Callable[..., Rule]] = {
        "independent": Independent,
        "papa-all": MergeAll,
        "papa-2": partial(MergePairs, seed=config.seed),
        "pair-75": partial(MergePairs, share=0.75, seed=config.seed),
        "many-half": MergeMany,
        "many-75": partial(MergeMany, share=0.75),
    }
    return merges[config.method](every_steps=every_steps, start=start, stop=stop)


def numerics_for(config: Config) -> Numerics:
    """Precision, memory format and clipping."""
    dtypes = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return Numerics(
        autocast=dtypes[config.train.precision],
        channels_last=config.train.channels_last,
        clip_norm=config.train.clip_norm,
    )


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is an accelerator where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device is {name}, which cannot be used here: {error}") from error
    return device
