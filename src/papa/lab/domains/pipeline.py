"""Preprocessing and augmentation of batches of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from papa.evaluation.scores import Batch
from papa.lab.augment.images import normalize, random_crop, random_flip
from papa.lab.augment.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ImagePipeline:
    """From uint8 images to a network's inputs, a batch at a time, on the images' device."""

    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    """The number of pixels by which training images are shifted, at most."""
    flip: bool = False
    """Whether training images are mirrored at random."""
    resize: int | None = None
    """The height and width before normalisation; None to leave the size."""
    ignore: int | None = None
    """The label of pixels without a class; None when all have one."""

    @property
    def draws(self) -> bool:
        """Whether training images are changed at random under every policy."""
        return self.crop_padding > 0 or self.flip

    def prepare(self, images: Tensor) -> Tensor:
        """Resize and normalise uint8 images; nothing random."""
        if self.resize is not None:
            size = (self.resize, self.resize)
            resized = F.interpolate(images.float(), size, mode="bicubic", antialias=True, align_corners=False)
            images = resized.round_().clamp_(0, 255).to(torch.uint8)
        return normalize(images, self.mean, self.std)

    def augment(
        self,
        images: Tensor,
        targets: Tensor,
        generator: torch.Generator,
        *,
        policy: Policy | Callable[[torch.Generator], Policy],
    ) -> Batch:
        """Shift and mirror, then apply the policy around normalisation; a function draws a policy for each batch."""
        drawn = policy if isinstance(policy, Policy) else policy(generator)
        shifted = random_crop(images, padding=self.crop_padding, generator=generator)
        if self.flip:
            shifted = random_flip(shifted, generator=generator)
        inputs = self.prepare(drawn.on_images(shifted, generator))
        return drawn.on_batch(inputs, targets, num_classes=self.num_classes, generator=generator, ignore=self.ignore)
