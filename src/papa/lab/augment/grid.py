"""Which member gets which policy: the paper's grids, and draws from them."""

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
    """The values each augmentation may take; a policy is one of their combinations.

    Example:
        >>> grid = Grid(mixup=(0.0, 0.5), smoothing=(0.0, 0.1))
        >>> [policy.description for policy in grid.policies]
        ['plain', 'smoothing 0.1', 'mixup 0.5', 'mixup 0.5, smoothing 0.1']
    """

    mixup: tuple[float, ...] = (0.0,)
    """Alphas of Mixup."""
    smoothing: tuple[float, ...] = (0.0,)
    """Shares of label smoothing."""
    cutmix: tuple[float, ...] = (0.0,)
    """Alphas of CutMix."""
    erasing: tuple[float, ...] = (0.0,)
    """Probabilities of Random Erasing."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if not isinstance(values, (tuple, list)) or not values:
                raise ConfigError(f"the grid's {field.name} is {values!r}, expected at least one value in a tuple")
            object.__setattr__(self, field.name, tuple(values))
        _ = self.policies  # checks every value

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        """Every combination, the last field changing fastest."""
        points = itertools.product(self.mixup, self.smoothing, self.cutmix, self.erasing)
        return tuple(
            Policy(mixup=mixup, smoothing=smoothing, cutmix=cutmix, erasing=erasing)
            for mixup, smoothing, cutmix, erasing in points
        )

    def __len__(self) -> int:
        return len(self.policies)


PLAIN = Grid()
"""A single point: no augmentation beyond crop and flip."""

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
    """One policy per member, without replacement: the shuffled grid, started over when members outnumber policies.

    Member `j`'s policy depends on the grid and the seed, not on how many members there are.

    Example:
        >>> policies = draw_policies(DEFAULT_GRID, 5, seed=1)
        >>> policies[:3] == draw_policies(DEFAULT_GRID, 3, seed=1)
        True

    Args:
        grid: the policies to draw from.
        num_members: how many to draw.
        seed: the run's seed.
    """
    if num_members < 1:
        raise ConfigError(f"num_members is {num_members}, expected at least 1")
    order = torch.randperm(len(grid), generator=stream(seed, "policy")).tolist()
    return tuple(grid.policies[order[member % len(grid)]] for member in range(num_members))


def draw_policy_per_batch(grid: Grid, generator: torch.Generator) -> Policy:
    """One policy, drawn uniformly: for the baseline in which a single network gets a new one for every mini-batch."""
    return grid.policies[int(torch.randint(len(grid), (), generator=generator))]
