"""Tasks: what networks are trained for, and so how they are applied, what they minimise and how they are scored."""

from papa.tasks.apply import apply_in_windows, apply_whole
from papa.tasks.picture import side_by_side
from papa.tasks.segmentation import F1, pixel_cross_entropy
from papa.tasks.task import Task, classification, segmentation

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
