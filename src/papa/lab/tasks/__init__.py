"""Tasks of the lab: image classification and segmentation."""

from papa.lab.tasks.apply import apply_in_windows, apply_whole
from papa.lab.tasks.picture import side_by_side
from papa.lab.tasks.segmentation import F1, pixel_cross_entropy, segmentation
from papa.task import Task

__all__ = [
    "F1",
    "apply_in_windows",
    "apply_whole",
    "classification",
    "pixel_cross_entropy",
    "segmentation",
    "side_by_side",
]


def classification() -> Task:
    """The task of one class per image: cross entropy, scored by the accuracy in percent."""
    return Task()
