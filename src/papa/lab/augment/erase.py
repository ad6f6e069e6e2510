"""Random Erasing and Cutout: set one rectangle of each normalised image to zero.

Boxes are (N, 4) tensors of (top, bottom, left, right), where bottom and right are exclusive.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_AREA, MAX_AREA = 0.02, 1 / 3
MIN_ASPECT, MAX_ASPECT = 0.3, 1 / 0.3
NUM_ATTEMPTS = 10


def random_erase(inputs: Tensor, probability: float, *, generator: torch.Generator) -> Tensor:
    """Random Erasing: with the given probability, set a random rectangle of an image to zero."""
    boxes = draw_erasing_boxes(len(inputs), *inputs.shape[2:], probability=probability, generator=generator)
    return fill_boxes(inputs, boxes)


def cutout(inputs: Tensor, length: int, *, generator: torch.Generator) -> Tensor:
    """Cutout: set a square of `length` pixels around a random centre to zero in every image."""
    return fill_boxes(inputs, draw_cutout_boxes(len(inputs), *inputs.shape[2:], length=length, generator=generator))


def draw_erasing_boxes(
    num_images: int, height: int, width: int, *, probability: float, generator: torch.Generator
) -> Tensor:
    """Draw one box per image, empty for images that are not erased.

    The area is uniform from 2% to a third of the image, the aspect ratio log-uniform from 0.3 to 1/0.3, the position
    uniform. A box that is not smaller than the image on both sides is drawn again, ten times at most; after that the
    image is not erased.
    """
    # In float64, a uniform number below 1 times n stays below n. All attempts are drawn at once.
    uniform = torch.rand(num_images, 3 + 2 * NUM_ATTEMPTS, dtype=torch.float64, generator=generator)
    is_erased, down, right = uniform[:, 0] < probability, uniform[:, 1], uniform[:, 2]
    area_share, aspect_share = uniform[:, 3:].view(num_images, 2, NUM_ATTEMPTS).unbind(1)
    area = height * width * (MIN_AREA + (MAX_AREA - MIN_AREA) * area_share)
    log_aspect = math.log(MIN_ASPECT) + (math.log(MAX_ASPECT) - math.log(MIN_ASPECT)) * aspect_share
    tall = (area * log_aspect.exp()).sqrt().round()
    wide = (area / log_aspect.exp()).sqrt().round()
    fits = (tall < height) & (wide < width)
    first_fit = fits.to(torch.uint8).argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first_fit)[:, 0], wide.gather(1, first_fit)[:, 0]
    top = (down * (height - tall + 1)).floor()
    left = (right * (width - wide + 1)).floor()
    boxes = torch.stack((top, top + tall, left, left + wide), dim=1).long()
    return boxes * (is_erased & fits.any(1))[:, None]


def draw_cutout_boxes(num_images: int, height: int, width: int, *, length: int, generator: torch.Generator) -> Tensor:
    """Draw one square per image around a uniformly drawn pixel, clipped at the borders."""
    top = torch.randint(height, (num_images,), generator=generator) - length // 2
    left = torch.randint(width, (num_images,), generator=generator) - length // 2
    vertical = torch.stack((top, top + length), dim=1).clamp(0, height)
    horizontal = torch.stack((left, left + length), dim=1).clamp(0, width)
    return torch.cat((vertical, horizontal), dim=1)


def fill_boxes(inputs: Tensor, boxes: Tensor) -> Tensor:
    """Set each image's box to zero in all channels; the images must be finite."""
    height, width = inputs.shape[2:]
    top, bottom, left, right = boxes.to(inputs.device)[:, :, None].unbind(1)
    rows = torch.arange(height, device=inputs.device)
    columns = torch.arange(width, device=inputs.device)
    in_rows = ((rows >= top) & (rows < bottom)).to(inputs.dtype)
    in_columns = ((columns >= left) & (columns < right)).to(inputs.dtype)
    # Multiplying by zeros and ones is five times as fast as `masked_fill`.
    kept = 1 - in_rows[:, :, None] * in_columns[:, None, :]
    return inputs * kept[:, None]
