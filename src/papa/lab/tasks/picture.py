"""A picture of a segmentation: the image, its labels, and a network's prediction."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from papa.evaluation.scores import evaluating
from papa.lab.data.files import pillow
from papa.lab.data.tiles import Tiles
from papa.lab.tasks.segmentation import F1
from papa.training import Training

WIDTH = 1500
"""The approximate width of a picture, in pixels."""
GAP = 8
"""White pixels between its parts."""
LINE = 24
"""The height of a line of the legend."""


def side_by_side(image: Tensor, labels: Tensor, prediction: Tensor, *, classes: Sequence[str]) -> bytes:
    """A PNG with an image, its labels and a prediction side by side, and a legend of the classes.

    Pixels without a class are black, in the prediction too.
    """
    module = pillow()
    panels = module.fromarray(panels_of(image, labels, prediction, len(classes)).numpy())
    if panels.width > WIDTH:
        panels = panels.reduce(-(-panels.width // WIDTH))
    else:
        factor = WIDTH // panels.width
        panels = panels.resize((panels.width * factor, panels.height * factor), module.NEAREST)
    legend = _legend(classes, panels.width)
    picture = module.new("RGB", (panels.width, panels.height + GAP + legend.height), "white")
    picture.paste(panels, (0, 0))
    picture.paste(legend, (0, panels.height + GAP))
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def panels_of(image: Tensor, labels: Tensor, prediction: Tensor, num_classes: int) -> Tensor:
    """The image, the labels and the prediction in colors, with gaps between them: (height, width, 3) bytes."""
    colors, is_class = palette(num_classes), labels < num_classes
    truth, predicted = (colors[part.long().where(is_class, num_classes).cpu()] for part in (labels, prediction))
    white = torch.full((len(labels), GAP, 3), 255, dtype=torch.uint8)
    return torch.cat([image.permute(1, 2, 0).cpu(), white, truth, white, predicted], dim=1)


def palette(num_classes: int) -> Tensor:
    """One color per class, with evenly spaced hues, and black at the end.

    Example:
        >>> palette(3).tolist()
        [[217, 65, 65], [65, 217, 65], [65, 65, 217], [0, 0, 0]]
    """
    hues = [colorsys.hsv_to_rgb(label / num_classes, 0.7, 0.85) for label in range(num_classes)]
    return torch.tensor([[round(255 * part) for part in hue] for hue in [*hues, (0.0, 0.0, 0.0)]], dtype=torch.uint8)


def _legend(classes: Sequence[str], width: int) -> Any:
    from PIL import ImageDraw

    entries = [*zip(classes, palette(len(classes)).tolist(), strict=False), ("no class", [0, 0, 0])]
    per_line = max(1, width // 160)
    num_lines = -(-len(entries) // per_line)
    legend = pillow().new("RGB", (width, num_lines * LINE), "white")
    draw = ImageDraw.Draw(legend)
    for index, (name, color) in enumerate(entries):
        line, column = divmod(index, per_line)
        left, top = GAP + column * 160, line * LINE
        draw.rectangle((left, top + 4, left + 15, top + 19), fill=tuple(color))
        draw.text((left + 22, top + 6), name.encode("latin-1", "replace").decode("latin-1"), fill="black")
    return legend


@torch.no_grad()
def prediction_picture(training: Training, network: nn.Module) -> bytes | None:
    """A test tile with many classes, its labels and the network's prediction, as PNG; None for other tasks."""
    tiles, metric = training.data.test, training.task.metric
    if not isinstance(tiles, Tiles) or not isinstance(metric, F1):
        return None
    most_classes = max(range(len(tiles)), key=lambda index: len(torch.unique(tiles.planes[index][3])))
    images, labels = tiles.batch(torch.tensor([most_classes]))
    with evaluating(network):
        scores = training.task.apply(network, training.batches.prepare(images.to(training.device)))
    prediction = scores[0].argmax(dim=0).cpu()
    return side_by_side(images[0], labels[0], prediction, classes=metric.classes)
