"""The networks that every matching criterion must handle."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from helpers import Attention
from papa.align import Symmetries
from papa.lab import models


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths or (5, 12, 9, 3)):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(32, 2, 1),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (16, 5)),
    "resnet18": (lambda: models.resnet18(width=8), (4, 3, 32, 32)),
    "resnet20": (lambda: models.resnet20(width=4), (4, 3, 32, 32)),
    "vgg": (lambda: models.VGG(11, width=8), (8, 3, 32, 32)),
    "attention": (Attention, (8, 5, 6)),
    "grouped": (grouped, (8, 3, 10, 10)),
}


@torch.no_grad()
def noisy_(model: nn.Module, amount: float) -> nn.Module:
    for tensor in model.parameters():
        tensor.add_(amount * torch.randn_like(tensor))
    return model


def same(first: nn.Module, second: nn.Module, tolerance: float = 0.0) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(bool(((a - b).abs() <= tolerance).all()) for a, b in pairs)


def random_permutations(symmetries: Symmetries) -> dict[str, Tensor]:
    return {group.name: torch.randperm(group.size) for group in symmetries}
