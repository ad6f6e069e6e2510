"""Tasks of the lab: image classification, segmentation and language modelling."""

from papa.ensemble import mean_logits, mean_probabilities
from papa.lab.tasks.apply import apply_in_windows, apply_whole
from papa.lab.tasks.language import TokenLoss, language_modelling, token_cross_entropy
from papa.lab.tasks.picture import side_by_side
from papa.lab.tasks.segmentation import F1, pixel_cross_entropy, segmentation
from papa.task import Task

__all__ = [
    "F1",
    "TokenLoss",
    "apply_in_windows",
    "apply_whole",
    "classification",
    "language_modelling",
    "pixel_cross_entropy",
    "segmentation",
    "side_by_side",
    "token_cross_entropy",
]

COMBINE = {"logits": mean_logits, "probabilities": mean_probabilities}
"""How ensembles combine outputs whose second dimension is that of the classes."""


def classification(*, ensemble: str = "logits") -> Task:
    """The task of one class per image: cross entropy, scored by the accuracy in percent.

    Args:
        ensemble: what ensembles average: `logits`, as in the paper, or `probabilities`.
    """
    return Task(combine=COMBINE[ensemble])
