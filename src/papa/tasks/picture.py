"""A picture of a segmentation: the image, its labels, and what a network says."""

from __future__ import annotations

import colorsys
import io

import torch
from torch import Tensor

from papa.data.decode import pillow

GAP = 8
"""White pixels between the pictures."""


def side_by_side(
    image: Tensor, labels: Tensor, prediction: Tensor, *, num_classes: int, max_width: int = 1800
) -> bytes:
    """A PNG with an image, its labels and a prediction beside each other; pixels without a class are black.

    Args:
        image: uint8, of shape (3, height, width).
        labels: of shape (height, width); whatever is not a class is black, in the prediction too.
        prediction: of shape (height, width).
        num_classes: how many classes have a colour.
        max_width: of the whole picture, in pixels.
    """
    is_class = labels < num_classes
    colours = palette(num_classes)
    pixels = image.permute(1, 2, 0).cpu()
    truth, answer = (colours[labels_.long().where(is_class, num_classes).cpu()] for labels_ in (labels, prediction))
    white = torch.full((len(labels), GAP, 3), 255, dtype=torch.uint8)
    picture = pillow().fromarray(torch.cat([pixels, white, truth, white, answer], dim=1).numpy())
    factor = -(-picture.width // max_width)
    if factor > 1:
        picture = picture.reduce(factor)
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def palette(num_classes: int) -> Tensor:
    """One colour per class, as far apart as hues go, and black after them.

    Example:
        >>> palette(3).tolist()
        [[217, 65, 65], [65, 217, 65], [65, 65, 217], [0, 0, 0]]
    """
    hues = [colorsys.hsv_to_rgb(label / num_classes, 0.7, 0.85) for label in range(num_classes)]
    return torch.tensor([[round(255 * part) for part in hue] for hue in [*hues, (0.0, 0.0, 0.0)]], dtype=torch.uint8)
