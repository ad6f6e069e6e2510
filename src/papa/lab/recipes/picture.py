"""A picture of a trained network's segmentation."""

from __future__ import annotations

import torch
from torch import nn

from papa.evaluation import evaluating
from papa.lab.data.tiles import Tiles
from papa.lab.tasks.picture import side_by_side
from papa.lab.tasks.segmentation import F1
from papa.training import Training


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
