"""Mixup, CutMix and label smoothing: images and targets that are blends of two.

One blend is drawn for a whole batch, and every image is blended with its partner in the reversed batch. Targets
follow: hard classes become shares of classes, the class axis in second place, as `cross_entropy` takes them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from papa.errors import DataError
from papa.lab.augment.images import check_images


class Box(NamedTuple):
    """A rectangle of pixels, with half-open ends."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, kw_only=True)
class Blend:
    """How each image of a batch is blended with its partner in the reversed batch."""

    share: float
    """Lambda: the image's own share, within [0, 1]."""
    box: Box | None = None
    """Where CutMix pastes the partner; None for Mixup, which fades it in everywhere."""


def draw_blend(
    *, mixup: float = 0.0, cutmix: float = 0.0, height: int, width: int, generator: torch.Generator
) -> Blend | None:
    """The blend of one batch: Mixup or CutMix, a fair coin between them when both are on, None when both are off.

        lambda ~ Beta(alpha, alpha)

    For CutMix the box has sides `sqrt(1 - lambda)` of the image's, rounded down, its centre is a pixel drawn
    uniformly, and it is clipped at the borders; lambda is then corrected to the share of pixels outside the box.

    Example:
        >>> blend = draw_blend(cutmix=1.0, height=32, width=32, generator=torch.Generator())
        >>> blend.share == 1 - (blend.box.bottom - blend.box.top) * (blend.box.right - blend.box.left) / 32**2
        True

    Args:
        mixup: alpha of Mixup, 0 for off.
        cutmix: alpha of CutMix, 0 for off.
        height: of the images.
        width: of the images.
        generator: where everything is drawn from.
    """
    if not mixup and not cutmix:
        return None
    with_cutmix = bool(cutmix) and (not mixup or _draw_whole(2, generator) == 1)
    share = _draw_share(cutmix if with_cutmix else mixup, generator)
    if not with_cutmix:
        return Blend(share=share)
    box = _draw_box(share, height, width, generator)
    return Blend(share=1.0 - _area(box) / (height * width), box=box)


def blend_images(inputs: Tensor, blend: Blend) -> Tensor:
    """Blend every image with its partner in the reversed batch.

        Mixup:   out = lambda x + (1 - lambda) x_reversed
        CutMix:  out = x_reversed inside the box, x outside

    Args:
        inputs: normalised images, the batch axis first; of shape (N, C, H, W) for CutMix; left as they are.
        blend: from `draw_blend`.
    """
    if blend.box is None:
        return inputs.flip(0).lerp_(inputs, blend.share)
    check_images(inputs, "CutMix")
    return _paste_reversed(inputs, blend.box)


def soft_targets(targets: Tensor, num_classes: int, *, smoothing: float = 0.0, ignore: int | None = None) -> Tensor:
    """Hard classes as shares of classes: `1 - s + s/K` at the class, `s/K` at all others.

    Example:
        >>> soft_targets(torch.tensor([1]), 4, smoothing=0.2)
        tensor([[0.0500, 0.8500, 0.0500, 0.0500]])

    Args:
        targets: whole numbers, of shape (N,), or (N, H, W) when every pixel has a class; left as they are.
        num_classes: K, from 0 to K - 1.
        smoothing: s.
        ignore: the number that stands for no class; such targets have no mass at all. None where every one has a class.

    Returns:
        float32, of shape (N, K) or (N, K, H, W).
    """
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool or targets.dim() == 0:
        raise DataError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}, expected a batch of whole numbers: "
            "blending and smoothing start from classes"
        )
    off_value = smoothing / num_classes
    on_value = 1.0 - smoothing + off_value
    soft = torch.full((len(targets), num_classes, *targets.shape[1:]), off_value, device=targets.device)
    if ignore is None:
        return soft.scatter_(1, targets.long()[:, None], on_value)
    is_class = (targets != ignore)[:, None]
    return soft.scatter_(1, targets.long()[:, None].where(is_class, 0), on_value).mul_(is_class)


def blend_targets(soft: Tensor, blend: Blend) -> Tensor:
    """Blend soft targets the way `blend_images` blends images.

    Args:
        soft: from `soft_targets`; left as they are. When every pixel has a target, CutMix pastes targets as it
            pastes pixels; else the shares of the image and its partner are lambda and `1 - lambda`.
        blend: the one the images were blended with.
    """
    if blend.box is not None and soft.dim() == 4:
        return _paste_reversed(soft, blend.box)
    return soft.flip(0).lerp_(soft, blend.share)


def _draw_whole(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


def _draw_share(alpha: float, generator: torch.Generator) -> float:
    # torch's own Beta draws from the global generator only.
    return random.Random(_draw_whole(2**63 - 1, generator)).betavariate(alpha, alpha)


def _draw_box(share: float, height: int, width: int, generator: torch.Generator) -> Box:
    side = math.sqrt(1.0 - share)
    tall, wide = int(height * side), int(width * side)
    top = _draw_whole(height, generator) - tall // 2
    left = _draw_whole(width, generator) - wide // 2
    return Box(max(top, 0), min(top + tall, height), max(left, 0), min(left + wide, width))


def _area(box: Box) -> int:
    return (box.bottom - box.top) * (box.right - box.left)


def _paste_reversed(batch: Tensor, box: Box) -> Tensor:
    pasted = batch.clone()
    inside = (..., slice(box.top, box.bottom), slice(box.left, box.right))
    pasted[inside] = batch[inside].flip(0)
    return pasted
