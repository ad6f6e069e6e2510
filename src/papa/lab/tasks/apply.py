"""Applying a network that gives scores for every pixel to images of any size: whole, or by windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def apply_whole(model: nn.Module, images: Tensor) -> Tensor:
    """Scores for every pixel, the whole image at once.

    A network that takes only sizes divisible by some number says so as `model.multiple` (UNet: 16): images are then
    continued to the right and below by their reflection, and the scores of what was added are cut off.

    Example:
        >>> from papa.lab.models import UNet
        >>> apply_whole(UNet(num_classes=6, width=2).eval(), torch.zeros(1, 3, 20, 33)).shape
        torch.Size([1, 6, 20, 33])

    Args:
        model: from (N, channels, height, width) to (N, classes, height, width).
        images: of any height and width.
    """
    height, width = images.shape[-2:]
    multiple = int(getattr(model, "multiple", 1))
    tall, wide = (-(-side // multiple) * multiple for side in (height, width))
    if (tall, wide) != (height, width):
        rows, columns = reflected(height, tall).to(images.device), reflected(width, wide).to(images.device)
        images = images.index_select(-2, rows).index_select(-1, columns)
    scores: Tensor = model(images)
    return scores[..., :height, :width]


def apply_in_windows(model: nn.Module, images: Tensor, *, window: int, overlap: int) -> Tensor:
    """Scores for every pixel, a window at a time, for images that are too large for memory; means where they overlap.

    Windows lie in rows and columns, `window - overlap` apart, the last ones at the border. With windows as large as
    the image this is `apply_whole`.

    Args:
        model: as in `apply_whole`.
        images: of any height and width.
        window: height and width of a window.
        overlap: the least number of pixels that neighbouring windows share.
    """
    height, width = images.shape[-2:]
    total: Tensor | None = None
    counts = torch.zeros(height, width, device=images.device)
    for top in window_starts(height, window, overlap):
        for left in window_starts(width, window, overlap):
            here = (..., slice(top, top + window), slice(left, left + window))
            scores = apply_whole(model, images[here]).float()
            if total is None:
                total = scores.new_zeros(*scores.shape[:2], height, width)
            total[here] += scores
            counts[here] += 1.0
    assert total is not None
    return total / counts


def window_starts(side: int, window: int, overlap: int) -> list[int]:
    """Where windows start along one side of an image.

    Example:
        >>> window_starts(10, 4, 1), window_starts(10, 4, 0), window_starts(3, 4, 1)
        ([0, 3, 6], [0, 4, 6], [0])
    """
    last = max(0, side - window)
    return [*range(0, last, window - overlap), last]


def reflected(side: int, length: int) -> Tensor:
    """The indices of a line of `side` pixels continued to `length` by its reflection, however often it takes.

    Example:
        >>> reflected(3, 8).tolist()
        [0, 1, 2, 1, 0, 1, 2, 1]
    """
    period = max(1, 2 * (side - 1))
    places = torch.arange(length, device="cpu") % period
    return torch.minimum(places, period - places)
