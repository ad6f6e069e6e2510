"""Segmentation: cross entropy and F1 over pixels, some of which have no class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from papa.errors import DataError


def pixel_cross_entropy(outputs: Tensor, targets: Tensor, *, ignore: int = 255) -> Tensor:
    """The mean cross entropy of pixels that have a class; 0 where none has.

        loss = - sum_pixels sum_classes t log softmax(outputs) / sum_pixels sum_classes t

    Args:
        outputs: scores of shape (N, classes, height, width).
        targets: labels of shape (N, height, width), or shares of classes shaped like the outputs, as Mixup and
            smoothing make them: there, a pixel without a class has no mass, and one blended with such a pixel less.
        ignore: the label of pixels that have no class.
    """
    if targets.is_floating_point():
        total, mass = F.cross_entropy(outputs, targets, reduction="sum"), targets.sum()
    else:
        total = F.cross_entropy(outputs, targets.long(), ignore_index=ignore, reduction="sum")
        mass = (targets != ignore).sum()
    return total / torch.where(mass > 0, mass, 1)


class F1:
    """F1 of each class over all pixels of a data set, in percent; the score is their average over classes.

        F1 = 2 TP / (2 TP + FP + FN)

    Pixels are counted over the whole set first: a mean of images' F1 would be another number. A class that no pixel
    is labelled with has no F1 and is left out of the average, for every network alike, whatever it predicts.

    Example:
        >>> metric = F1(["road", "tree"])
        >>> outputs = torch.tensor([[[[2.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 1.0]]]])  # road, road, tree, tree
        >>> counts = metric.counts(outputs, torch.tensor([[[0, 1, 1, 255]]]))
        >>> {name: round(value, 2) for name, value in metric.details(counts).items()}
        {'accuracy': 66.67, 'average F1': 66.67, 'F1 road': 66.67, 'F1 tree': 66.67}

    Args:
        classes: their names, in the order of their labels.
        ignore: the label of pixels that have no class; they count nowhere.
    """

    def __init__(self, classes: Sequence[str], *, ignore: int = 255) -> None:
        self.classes, self.ignore = tuple(classes), ignore

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many pixels of each class (row) were taken for each class (column)."""
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
        """The average F1 of the classes that pixels are labelled with."""
        return self.details(counts)["average F1"]

    def details(self, counts: Tensor) -> dict[str, float]:
        """Accuracy, average F1, and the F1 of each class that pixels are labelled with."""
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
