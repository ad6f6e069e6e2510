"""Residual networks for 32x32 images: ResNet-18 with a small stem, and ResNet-20."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

Shortcut: TypeAlias = Callable[[int, int, int], nn.Module]
"""Makes the shortcut of a block that changes the shape, from (input channels, output channels, stride)."""


def resnet18(*, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-18 (He et al., 2016) for 32x32 images: a 3x3 stem of stride 1 and no max pool.

    Example:
        >>> import torch
        >>> resnet18(num_classes=100, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    return ResNet(
        (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels, width=width, shortcut=projection_shortcut
    )


def resnet20(*, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> ResNet:
    """ResNet-20 (He et al., 2016, section 4.2): three stages of three blocks, shortcuts without parameters.

    Example:
        >>> import torch
        >>> resnet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return ResNet((3, 3, 3), num_classes=num_classes, in_channels=in_channels, width=width, shortcut=ZeroPadShortcut)


class ResNet(nn.Module):
    """Stages of basic blocks; each stage after the first halves the image and doubles the channels.

    Convolutions are initialised by `kaiming_normal_` (fan out).
    """

    def __init__(
        self, num_blocks: Sequence[int], *, num_classes: int, in_channels: int, width: int, shortcut: Shortcut
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(in_channels, width, 1), nn.BatchNorm2d(width), nn.ReLU())
        stages = []
        channels = width
        for stage, num_stage_blocks in enumerate(num_blocks):
            blocks = []
            for block in range(num_stage_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(channels, width * 2**stage, stride=stride, shortcut=shortcut))
                channels = width * 2**stage
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.stages(self.stem(images))))
        return scores


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(in_channels, out_channels, stride),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            _convolution(out_channels, out_channels, 1),
            nn.BatchNorm2d(out_channels),
        )
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same_shape else shortcut(in_channels, out_channels, stride)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.relu(self.body(inputs) + self.shortcut(inputs))
        return outputs


def projection_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """He et al.'s option B: a 1x1 convolution with BatchNorm."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class ZeroPadShortcut(nn.Module):
    """He et al.'s option A, without parameters: subsample pixels and add channels of zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.num_new_channels = out_channels - in_channels

    def forward(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new_channels))


def _convolution(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
