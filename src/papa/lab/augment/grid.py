"""The paper's grids of augmentation policies, and how members draw their policy from a grid."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

import torch

from papa.errors import ConfigError
from papa.lab.augment.policy import Policy
from papa.streams import stream


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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if not isinstance(values, (tuple, list)) or not values:
                raise ConfigError(f"the grid's {field.name} is {values!r}, expected at least one value in a tuple")
            object.__setattr__(self, field.name, tuple(values))
        _ = self.policies  # checks every value

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        """All combinations; the last field changes fastest."""
        values = dataclasses.asdict(self)
        return tuple(Policy(**dict(zip(values, point, strict=True))) for point in itertools.product(*values.values()))

    def __len__(self) -> int:
        return len(self.policies)


PLAIN = Grid()
"""One policy: no augmentation beyond crop and flip."""

DEFAULT_GRID = Grid(
    mixup=(0.0, 0.5, 1.0), smoothing=(0.0, 0.05, 0.1), cutmix=(0.0, 0.5, 1.0), erasing=(0.0, 0.15, 0.35)
)
"""The paper's grid for CIFAR and fine-tuning: 81 policies."""

IMAGENET_GRID = Grid(mixup=(0.0, 0.2), smoothing=(0.0, 0.1), cutmix=(0.0, 1.0), erasing=(0.0, 0.35))
"""The paper's grid for ImageNet: 16 policies."""

ABLATION_GRID = Grid(mixup=(0.0, 0.5, 1.0), smoothing=(0.0, 0.05, 0.1))
"""The paper's grid for its ablations: 9 policies."""

SEGMENTATION_GRID = Grid(mixup=(0.0, 0.2, 0.4), smoothing=(0.0, 0.05, 0.1))
"""The paper's grid for segmentation: 9 policies."""

DART_POLICIES = (Policy(randaugment="rand-m4-n1-p1.0-mstd1.0"), Policy(cutmix=0.5), Policy(cutout=8))
"""The policies of DART's three members."""


def draw_policies(grid: Grid, num_members: int, *, seed: int) -> tuple[Policy, ...]:
    """Draw one policy per member without replacement; the shuffled grid repeats if there are more members.

    The policy of a member does not depend on the number of members.

    Example:
        >>> policies = draw_policies(DEFAULT_GRID, 5, seed=1)
        >>> policies[:3] == draw_policies(DEFAULT_GRID, 3, seed=1)
        True
    """
    if num_members < 1:
        raise ConfigError(f"num_members is {num_members}, expected at least 1")
    order = torch.randperm(len(grid), generator=stream(seed, "policy")).tolist()
    return tuple(grid.policies[order[member % len(grid)]] for member in range(num_members))


def draw_policy_per_batch(grid: Grid, generator: torch.Generator) -> Policy:
    """Draw one policy uniformly, for the baseline that trains one network with a new policy for every batch."""
    return grid.policies[int(torch.randint(len(grid), (), generator=generator))]
