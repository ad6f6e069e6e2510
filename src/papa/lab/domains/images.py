"""Images: classification, and segmentation where every pixel has a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from papa.errors import ConfigError, did_you_mean
from papa.lab.augment.policy import DART_POLICIES, GRIDS, Grid, Policy, draw_policies, draw_policy_per_batch
from papa.lab.config import Config
from papa.lab.data import ImageSet, load_images, load_tiles, load_vaihingen
from papa.lab.data.images import FOLDERS
from papa.lab.domains.base import COMBINE, Domain
from papa.lab.domains.pipeline import ImagePipeline
from papa.lab.models import input_size_of, make_model, normalization_of
from papa.lab.tasks.segmentation import segmentation
from papa.training import Augment, Transforms
from papa.training.data import Data
from papa.training.task import Task

TILES: dict[str, Callable[..., ImageSet]] = {"tiles": load_tiles, "vaihingen": load_vaihingen}
"""Data sets whose every pixel has a class."""


@dataclass(frozen=True)
class ImageDomain(Domain):
    """An image data set."""

    images: ImageSet

    def split(self) -> Data:
        return self.images.split(self.config.data.validation, seed=self.config.seed)

    def task(self) -> Task:
        combine = COMBINE[self.config.average.ensemble]
        if self.images.ignore is None:
            return Task(combine=combine)
        return segmentation(self.images.classes, ignore=self.images.ignore, combine=combine)

    def make_network(self) -> nn.Module:
        model = self.config.model
        return make_model(
            model.name,
            num_classes=self.images.num_classes,
            in_channels=self.images.channels,
            image_size=self.image_size,
            width=model.width,
            pretrained=model.pretrained and model.weights is None,
            weights=model.weights,
        )

    def transforms(self) -> Transforms:
        return Transforms(augment=self._augments(), prepare=self.pipeline.prepare)

    def card(self) -> dict[str, Any]:
        pipeline = self.pipeline
        return {
            "num_classes": self.images.num_classes,
            "in_channels": self.images.channels,
            "image_size": self.image_size,
            "mean": list(pipeline.mean),
            "std": list(pipeline.std),
            "resize": pipeline.resize,
            "classes": list(self.images.classes),
        }

    @property
    def image_size(self) -> int:
        """The height and width of the network's inputs."""
        return wanted_image_size(self.config) or self.images.image_size

    @property
    def pipeline(self) -> ImagePipeline:
        """What happens to images on their way into the network."""
        images = self.images
        mean, std = normalization_of(self.config.model.name) or (images.mean, images.std)
        return ImagePipeline(
            num_classes=images.num_classes,
            mean=mean,
            std=std,
            crop_padding=images.crop_padding,
            flip=images.flip,
            resize=None if self.image_size == images.image_size else self.image_size,
            ignore=images.ignore,
        )

    def _augments(self) -> list[Augment] | None:
        """Each member's way from raw images to what it trains on; None where nothing happens but `prepare`."""
        config, pipeline = self.config, self.pipeline
        if not pipeline.draws and config.diversity.grid != "dart" and grid_for(config) == Grid():
            return None
        if config.diversity.per_batch:
            drawn = partial(draw_policy_per_batch, grid_for(config))
            return [partial(pipeline.augment, policy=drawn)] * config.members
        return [partial(pipeline.augment, policy=policy) for policy in policies_for(config)]


def load_image_domain(config: Config) -> ImageDomain:
    """The images of a config."""
    data = config.data
    if data.name in TILES:
        images = TILES[data.name](
            data.root,
            patch_size=data.patch_size,
            patches_per_epoch=data.patches_per_epoch,
            shrink=data.shrink,
            max_test=data.max_test,
        )
    else:
        # Small images are resized a batch at a time on their way into the network; photographs when they are decoded.
        size = wanted_image_size(config) if data.name in FOLDERS else None
        images = load_images(
            data.name,
            root=data.root,
            image_size=size,
            max_train=data.max_train,
            max_test=data.max_test,
            test_share=data.test_share,
        )
    return ImageDomain(config, images)


def wanted_image_size(config: Config) -> int | None:
    """How large images should be: as asked, else as timm's network wants, else None for as they are."""
    if config.data.name in TILES:
        return None
    if config.data.image_size is not None:
        return config.data.image_size
    return input_size_of(config.model.name) if config.model.name.startswith("timm:") else None


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
