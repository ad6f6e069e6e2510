"""A multilayer perceptron for tables."""

from __future__ import annotations

from torch import nn


class MLP(nn.Sequential):
    """Two hidden layers with BatchNorm, ReLU and dropout.

    Example:
        >>> import torch
        >>> MLP(13, 3)(torch.zeros(2, 13)).shape
        torch.Size([2, 3])
    """

    WIDTH = 128

    def __init__(self, num_features: int, num_classes: int, *, width: int = WIDTH, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for size in (num_features, width):
            layers += [nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*layers, nn.Linear(width, num_classes))
