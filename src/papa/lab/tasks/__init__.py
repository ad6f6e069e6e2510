"""Tasks: what networks are trained for, and so how they are applied, what they minimise and how they are scored."""

from papa.lab.tasks.apply import apply_in_windows, apply_whole
from papa.lab.tasks.picture import side_by_side
from papa.lab.tasks.segmentation import F1, pixel_cross_entropy
from papa.lab.tasks.task import Task, classification, segmentation

__all__ = [
    "F1",
    "Task",
    "apply_in_windows",
    "apply_whole",
    "classification",
    "pixel_cross_entropy",
    "segmentation",
    "side_by_side",
]
