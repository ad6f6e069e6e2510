"""Augmentation of image batches, and which member gets which policy.

All functions work on a whole batch on the training device, change nothing in place, and draw from a CPU generator that
is passed in, so results depend on the generator alone. A batch is processed in this order:

    uint8 images -> random_crop, random_flip -> policy.on_images -> normalize -> policy.on_batch -> network
"""

from papa.lab.augment.images import normalize, random_crop, random_flip
from papa.lab.augment.policy import (
    ABLATION_GRID,
    DART_POLICIES,
    DEFAULT_GRID,
    IMAGENET_GRID,
    PLAIN,
    SEGMENTATION_GRID,
    Grid,
    Policy,
    draw_policies,
    draw_policy_per_batch,
)

__all__ = [
    "ABLATION_GRID",
    "DART_POLICIES",
    "DEFAULT_GRID",
    "IMAGENET_GRID",
    "PLAIN",
    "SEGMENTATION_GRID",
    "Grid",
    "Policy",
    "draw_policies",
    "draw_policy_per_batch",
    "normalize",
    "random_crop",
    "random_flip",
]
