"""Applying a segmentation network to images of any size: to the whole image, or window by window."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def apply_whole(model: nn.Module, images: Tensor) -> Tensor:
    """Class scores of every pixel, from one forward pass over whole images.

    If the network has an attribute `multiple` (UNet: 16), images are padded by reflection to the next multiple of it
    on the right and at the bottom, and the scores are cropped again.

    Example:
        >>> from papa.lab.models import UNet
        >>> apply_whole(UNet(num_classes=6, width=2).eval(), torch.zeros(1, 3, 20, 33)).shape
        torch.Size([1, 6, 20, 33])
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
    """Class scores of every pixel, window by window, for images that are too large for memory.

    Windows form a grid with a step of `window - overlap`; the last ones end at the border. Scores are averaged where
    windows overlap.
    """
    height, width = images.shape[-2:]
    total: Tensor | None = None
    counts = torch.zeros(height, width, device=images.device)
    for top in window_starts(height, window, overlap):
        for left in window_starts(width, window, overlap):
            inside = (..., slice(top, top + window), slice(left, left + window))
            scores = apply_whole(model, images[inside]).float()
            if total is None:
                total = scores.new_zeros(*scores.shape[:2], height, width)
            total[inside] += scores
            counts[inside] += 1.0
    assert total is not None
    return total / counts


def window_starts(side: int, window: int, overlap: int) -> list[int]:
    """The start of each window along one side of an image.

    Example:
        >>> window_starts(10, 4, 1), window_starts(10, 4, 0), window_starts(3, 4, 1)
        ([0, 3, 6], [0, 4, 6], [0])
    """
    last = max(0, side - window)
    return [*range(0, last, window - overlap), last]


def reflected(side: int, length: int) -> Tensor:
    """Indices that extend a line of `side` pixels to `length` by reflection, repeatedly if necessary.

    Example:
        >>> reflected(3, 8).tolist()
        [0, 1, 2, 1, 0, 1, 2, 1]
    """
    period = max(1, 2 * (side - 1))
    places = torch.arange(length, device="cpu") % period
    return torch.minimum(places, period - places)
