"""Mixup, CutMix and label smoothing.

One blend is drawn per batch, and every image is blended with its partner in the reversed batch. Targets become soft:
class probabilities with the classes on axis 1, as `cross_entropy` takes them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Box(NamedTuple):
    """A rectangle of pixels; `bottom` and `right` are exclusive."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, kw_only=True)
class Blend:
    """How each image of a batch is blended with its partner in the reversed batch."""

    share: float
    """Lambda: the weight of the image itself, from 0 to 1."""
    box: Box | None = None
    """The rectangle that CutMix pastes from the partner; None for Mixup."""


def draw_blend(
    *, mixup: float = 0.0, cutmix: float = 0.0, height: int, width: int, generator: torch.Generator
) -> Blend | None:
    """Draw the blend of one batch: Mixup or CutMix with equal probability if both are on, None if both are off.

        lambda ~ Beta(alpha, alpha)

    The CutMix box has `sqrt(1 - lambda)` of the image's height and width, rounded down, around a pixel drawn uniformly,
    and is clipped at the borders; lambda is then set to the share of pixels outside the box.

    Example:
        >>> blend = draw_blend(cutmix=1.0, height=32, width=32, generator=torch.Generator())
        >>> blend.share == 1 - (blend.box.bottom - blend.box.top) * (blend.box.right - blend.box.left) / 32**2
        True

    An alpha of 0 turns `mixup` or `cutmix` off.
    """
    if not mixup and not cutmix:
        return None

    def integer(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    with_cutmix = bool(cutmix) and (not mixup or integer(2) == 1)
    alpha = cutmix if with_cutmix else mixup
    # torch's Beta distribution can only draw from the global generator.
    share = random.Random(integer(2**63 - 1)).betavariate(alpha, alpha)
    if not with_cutmix:
        return Blend(share=share)
    side = math.sqrt(1.0 - share)
    tall, wide = int(height * side), int(width * side)
    top = integer(height) - tall // 2
    left = integer(width) - wide // 2
    box = Box(max(top, 0), min(top + tall, height), max(left, 0), min(left + wide, width))
    area = (box.bottom - box.top) * (box.right - box.left)
    return Blend(share=1.0 - area / (height * width), box=box)


def blend_images(inputs: Tensor, blend: Blend) -> Tensor:
    """Blend every image with its partner in the reversed batch; CutMix needs images of shape (N, C, H, W).

    Mixup:   out = lambda x + (1 - lambda) x_reversed
    CutMix:  out = x_reversed inside the box, x outside
    """
    if blend.box is None:
        return inputs.flip(0).lerp_(inputs, blend.share)
    return _paste_reversed(inputs, blend.box)


def soft_targets(targets: Tensor, num_classes: int, *, smoothing: float = 0.0, ignore: int | None = None) -> Tensor:
    """Class probabilities for class labels: `1 - s + s/K` for the class, `s/K` for all others.

    Example:
        >>> soft_targets(torch.tensor([1]), 4, smoothing=0.2)
        tensor([[0.0500, 0.8500, 0.0500, 0.0500]])

    For labels (N,) or (N, H, W), the result is float32 of shape (N, K) or (N, K, H, W). All probabilities of the label
    `ignore` are 0.
    """
    off_value = smoothing / num_classes
    on_value = 1.0 - smoothing + off_value
    soft = torch.full((len(targets), num_classes, *targets.shape[1:]), off_value, device=targets.device)
    if ignore is None:
        return soft.scatter_(1, targets.long()[:, None], on_value)
    is_class = (targets != ignore)[:, None]
    return soft.scatter_(1, targets.long()[:, None].where(is_class, 0), on_value).mul_(is_class)


def blend_targets(soft: Tensor, blend: Blend) -> Tensor:
    """Blend soft targets as `blend_images` blends images: CutMix pastes targets of pixels, all else is Mixup."""
    if blend.box is not None and soft.dim() == 4:
        return _paste_reversed(soft, blend.box)
    return soft.flip(0).lerp_(soft, blend.share)


def _paste_reversed(batch: Tensor, box: Box) -> Tensor:
    pasted = batch.clone()
    inside = (..., slice(box.top, box.bottom), slice(box.left, box.right))
    pasted[inside] = batch[inside].flip(0)
    return pasted
