"""What happens to a batch of images on its way into a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from papa.evaluation import Batch
from papa.lab.augment import Policy, normalize, random_crop, random_flip


@dataclass(frozen=True, kw_only=True)
class ImagePipeline:
    """From uint8 images to what a network sees, a whole batch at a time, on the device the images are on."""

    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int
    """How far a training image may be shifted."""
    flip: bool
    """Whether training images are mirrored at random."""
    resize: int | None = None
    """Resize to this before normalising; None to leave the size."""
    ignore: int | None = None
    """The label of pixels without a class; None where everything has one."""

    @property
    def draws(self) -> bool:
        """Whether training images are changed at random, whatever the policy."""
        return self.crop_padding > 0 or self.flip

    def prepare(self, images: Tensor) -> Tensor:
        """Resize and normalise; nothing random."""
        return prepared(images, mean=self.mean, std=self.std, resize=self.resize)

    def augment(
        self,
        images: Tensor,
        targets: Tensor,
        generator: torch.Generator,
        *,
        policy: Policy | Callable[[torch.Generator], Policy],
    ) -> Batch:
        """Shift and mirror, then the policy around the normalisation; a policy may be drawn for each batch."""
        drawn = policy if isinstance(policy, Policy) else policy(generator)
        shifted = random_crop(images, padding=self.crop_padding, generator=generator)
        if self.flip:
            shifted = random_flip(shifted, generator=generator)
        inputs = self.prepare(drawn.on_images(shifted, generator))
        return drawn.on_batch(inputs, targets, num_classes=self.num_classes, generator=generator, ignore=self.ignore)


def prepared(images: Tensor, *, mean: tuple[float, ...], std: tuple[float, ...], resize: int | None) -> Tensor:
    """Images of pixels from 0 to 255, resized where asked for and normalised.

    Args:
        images: uint8, `(N, channels, height, width)`.
        mean: of each channel, of pixels scaled to [0, 1].
        std: the same.
        resize: the height and width they get; None to leave them.
    """
    if resize is not None:
        size = (resize, resize)
        resized = F.interpolate(images.float(), size, mode="bicubic", antialias=True, align_corners=False)
        images = resized.round_().clamp_(0, 255).to(torch.uint8)
    return normalize(images, mean, std)
