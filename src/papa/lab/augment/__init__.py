"""Augmentation: what happens to a batch between the data set and the network, and which member gets which policy.

Everything works on a whole batch of tensors on the training device, and draws from a CPU generator that is passed in,
so a result depends on the generator alone. A batch passes through in this order:

    uint8 images -> random_crop, random_flip -> policy.on_images -> normalize -> policy.on_batch -> network

`images` holds the everyday part, `blend`, `erase` and `randaugment` one kind of augmentation each, `policy` puts them
together, and `grid` hands policies to members.
"""

from __future__ import annotations

from papa.lab.augment.blend import Blend, Box, blend_images, blend_targets, draw_blend, soft_targets
from papa.lab.augment.erase import cutout, draw_cutout_boxes, draw_erasing_boxes, fill_boxes, random_erase
from papa.lab.augment.grid import (
    ABLATION_GRID,
    DART_POLICIES,
    DEFAULT_GRID,
    IMAGENET_GRID,
    PLAIN,
    SEGMENTATION_GRID,
    Grid,
    draw_policies,
    draw_policy_per_batch,
)
from papa.lab.augment.images import crop, flip, normalize, random_crop, random_flip
from papa.lab.augment.policy import Policy
from papa.lab.augment.randaugment import rand_augment

__all__ = [
    "ABLATION_GRID",
    "DART_POLICIES",
    "DEFAULT_GRID",
    "IMAGENET_GRID",
    "PLAIN",
    "SEGMENTATION_GRID",
    "Blend",
    "Box",
    "Grid",
    "Policy",
    "blend_images",
    "blend_targets",
    "crop",
    "cutout",
    "draw_blend",
    "draw_cutout_boxes",
    "draw_erasing_boxes",
    "draw_policies",
    "draw_policy_per_batch",
    "fill_boxes",
    "flip",
    "normalize",
    "rand_augment",
    "random_crop",
    "random_erase",
    "random_flip",
    "soft_targets",
]
