"""Segmentation, one class per pixel: cross entropy and F1 over all pixels that have a class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papa.errors import DataError
from papa.evaluation.scores import Combine, mean_logits
from papa.training.task import Task


def segmentation(
    classes: Sequence[str],
    *,
    ignore: int = 255,
    combine: Combine = mean_logits,
) -> Task:
    """The task of segmentation: `pixel_cross_entropy`, scored by the mean `F1` over classes in percent.

    Example:
        >>> task = segmentation(["road", "tree"])
        >>> task.eval_batch_size
        1

    Networks are applied to whole images.
    """
    loss = partial(pixel_cross_entropy, ignore=ignore)
    return Task(loss=loss, metric=F1(classes, ignore=ignore), apply=apply_whole, combine=combine, eval_batch_size=1)


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


def reflected(side: int, length: int) -> Tensor:
    """Indices that extend a line of `side` pixels to `length` by reflection, repeatedly if necessary.

    Example:
        >>> reflected(3, 8).tolist()
        [0, 1, 2, 1, 0, 1, 2, 1]
    """
    period = max(1, 2 * (side - 1))
    places = torch.arange(length, device="cpu") % period
    return torch.minimum(places, period - places)


def pixel_cross_entropy(outputs: Tensor, targets: Tensor, *, ignore: int = 255) -> Tensor:
    """The mean cross entropy over pixels with a class; 0 if there are none.

        loss = - sum_pixels sum_classes t log softmax(outputs) / sum_pixels sum_classes t

    Targets are labels of shape (N, height, width), or soft targets (Mixup, smoothing) of the outputs' shape. Soft
    targets of pixels without a class sum to 0, and of pixels blended with such pixels to less than 1.
    """
    if targets.is_floating_point():
        total, mass = F.cross_entropy(outputs, targets, reduction="sum"), targets.sum()
    else:
        total = F.cross_entropy(outputs, targets.long(), ignore_index=ignore, reduction="sum")
        mass = (targets != ignore).sum()
    return total / torch.where(mass > 0, mass, 1)


class F1:
    """The mean over classes of their F1 in percent, over all pixels of a data set.

        F1 = 2 TP / (2 TP + FP + FN)

    Pixels are counted over the whole data set, which differs from the mean of the F1 of each image. A class that no
    pixel is labelled with is left out of the mean, whatever the network predicts.

    Example:
        >>> metric = F1(["road", "tree"])
        >>> outputs = torch.tensor([[[[2.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 1.0]]]])  # road, road, tree, tree
        >>> counts = metric.counts(outputs, torch.tensor([[[0, 1, 1, 255]]]))
        >>> {name: round(value, 2) for name, value in metric.details(counts).items()}
        {'accuracy': 66.67, 'average F1': 66.67, 'F1 road': 66.67, 'F1 tree': 66.67}
    """

    def __init__(self, classes: Sequence[str], *, ignore: int = 255) -> None:
        self.classes, self.ignore = tuple(classes), ignore

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The confusion matrix: labels in rows, predictions in columns."""
        size = len(self.classes)
        if outputs.dim() < 3 or outputs.shape[1] != size or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
            raise DataError(
                f"F1 got outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}, expected "
                f"scores of {size} classes and a label for each pixel"
            )
        is_labelled = targets != self.ignore
        pairs = targets[is_labelled].long() * size + outputs.argmax(dim=1)[is_labelled]
        return torch.bincount(pairs, minlength=size * size).view(size, size)

    def score(self, counts: Tensor) -> float:
        return self.details(counts)["average F1"]

    def details(self, counts: Tensor) -> dict[str, float]:
        table = counts.double().cpu()
        hits, labelled, predicted = table.diagonal(), table.sum(1), table.sum(0)
        if not labelled.any():
            raise DataError("no pixel has a class: there is nothing to score, check the labels")
        scores = {
            f"F1 {name}": 200.0 * float(hits[label] / (labelled[label] + predicted[label]))
            for label, name in enumerate(self.classes)
            if labelled[label]
        }
        average = sum(scores.values()) / len(scores)
        return {"accuracy": 100.0 * float(hits.sum() / labelled.sum()), "average F1": average, **scores}
