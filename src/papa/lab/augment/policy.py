"""Augmentation policies: the augmentations of one member, the paper's grids of policies, and draws from them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from papa.lab.augment.blend import blend_images, blend_targets, draw_blend, soft_targets
from papa.lab.augment.erase import cutout, random_erase
from papa.lab.augment.randaugment import rand_augment
from papa.streams import stream


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Augmentations and their strengths; all are off by default.

    Example:
        >>> policy = Policy(mixup=0.5, smoothing=0.1)
        >>> policy.description
        'mixup 0.5, smoothing 0.1'
        >>> inputs, targets = torch.randn(8, 3, 32, 32), torch.arange(8)
        >>> inputs, targets = policy.on_batch(inputs, targets, num_classes=10, generator=torch.Generator())
        >>> targets.shape
        torch.Size([8, 10])
    """

    mixup: float = 0.0
    """Alpha of Mixup; if CutMix is on as well, each batch gets one of the two with equal probability."""
    smoothing: float = 0.0
    """Label smoothing: the probability that is spread over all classes."""
    cutmix: float = 0.0
    """Alpha of CutMix."""
    erasing: float = 0.0
    """The probability of Random Erasing for each image."""
    cutout: int = 0
    """The side of the Cutout square in pixels."""
    randaugment: str | None = None
    """timm's RandAugment string, such as `rand-m4-n1-p1.0-mstd1.0`."""

    @property
    def description(self) -> str:
        """The augmentations that are on, such as `mixup 0.5, smoothing 0.1`, or `plain`."""
        strengths = {name: value for name, value in self.to_dict().items() if value and name != "randaugment"}
        parts = [f"{name} {value:g}" for name, value in strengths.items()]
        if self.randaugment is not None:
            parts.append(self.randaugment)
        return ", ".join(parts) or "plain"

    @property
    def makes_soft_targets(self) -> bool:
        """Whether `on_batch` turns class labels into class probabilities."""
        return bool(self.mixup or self.cutmix or self.smoothing)

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON; `Policy(**policy.to_dict())` equals the policy."""
        return dataclasses.asdict(self)

    def on_images(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images if self.randaugment is None else rand_augment(images, self.randaugment, generator=generator)

    def on_batch(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        num_classes: int,
        generator: torch.Generator,
        ignore: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Augment a batch after normalisation: erasing, Cutout, then Mixup or CutMix, and label smoothing.

        Inputs are of shape (N, C, H, W), targets are class labels (N,), or (N, H, W) for one class per pixel, with the
        label `ignore` for "no class".

        Returns:
            Inputs and targets; targets are float32 class probabilities of shape (N, num_classes, ...) if
            `makes_soft_targets`, otherwise unchanged.
        """
        if self.erasing:
            inputs = random_erase(inputs, self.erasing, generator=generator)
        if self.cutout:
            inputs = cutout(inputs, self.cutout, generator=generator)
        if not self.makes_soft_targets:
            return inputs, targets
        soft = soft_targets(targets, num_classes, smoothing=self.smoothing, ignore=ignore)
        height, width = inputs.shape[-2:] if inputs.dim() > 2 else (1, 1)
        blend = draw_blend(mixup=self.mixup, cutmix=self.cutmix, height=height, width=width, generator=generator)
        if blend is None:
            return inputs, soft
        return blend_images(inputs, blend), blend_targets(soft, blend)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of each augmentation; policies are their combinations.

    Example:
        >>> grid = Grid(mixup=(0.0, 0.5), smoothing=(0.0, 0.1))
        >>> [policy.description for policy in grid.policies]
        ['plain', 'smoothing 0.1', 'mixup 0.5', 'mixup 0.5, smoothing 0.1']
    """

    mixup: tuple[float, ...] = (0.0,)
    smoothing: tuple[float, ...] = (0.0,)
    cutmix: tuple[float, ...] = (0.0,)
    erasing: tuple[float, ...] = (0.0,)

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        """All combinations; the last field changes fastest."""
        values = dataclasses.asdict(self)
        return tuple(Policy(**dict(zip(values, point, strict=True))) for point in itertools.product(*values.values()))

    def __len__(self) -> int:
        return len(self.policies)


GRIDS = {
    "none": Grid(),  # no augmentation beyond crop and flip
    "default": Grid(
        mixup=(0.0, 0.5, 1.0), smoothing=(0.0, 0.05, 0.1), cutmix=(0.0, 0.5, 1.0), erasing=(0.0, 0.15, 0.35)
    ),
    "imagenet": Grid(mixup=(0.0, 0.2), smoothing=(0.0, 0.1), cutmix=(0.0, 1.0), erasing=(0.0, 0.35)),
    "ablation": Grid(mixup=(0.0, 0.5, 1.0), smoothing=(0.0, 0.05, 0.1)),
    "segmentation": Grid(mixup=(0.0, 0.2, 0.4), smoothing=(0.0, 0.05, 0.1)),
}
"""The paper's grids, by `diversity.grid`; the default is for CIFAR and fine-tuning."""

DART_POLICIES = (Policy(randaugment="rand-m4-n1-p1.0-mstd1.0"), Policy(cutmix=0.5), Policy(cutout=8))
"""The policies of DART's three members."""


def draw_policies(grid: Grid, num_members: int, *, seed: int) -> tuple[Policy, ...]:
    """Draw one policy per member without replacement; the shuffled grid repeats if there are more members.

    The policy of a member does not depend on the number of members.

    Example:
        >>> policies = draw_policies(GRIDS["default"], 5, seed=1)
        >>> policies[:3] == draw_policies(GRIDS["default"], 3, seed=1)
        True
    """
    order = torch.randperm(len(grid), generator=stream(seed, "policy")).tolist()
    return tuple(grid.policies[order[member % len(grid)]] for member in range(num_members))


def draw_policy_per_batch(grid: Grid, generator: torch.Generator) -> Policy:
    """Draw one policy uniformly, for the baseline that trains one network with a new policy for every batch."""
    return grid.policies[int(torch.randint(len(grid), (), generator=generator))]
