"""Networks: VGG and ResNet for 32x32 images, small ones that train in seconds on a CPU, UNet for segmentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papa.errors import DataError

_CONVOLUTIONS_PER_STAGE = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
_WIDENING = (1, 2, 4, 8, 8)


class ConvNet(nn.Module):
    """Convolutional features, averaged over pixels, and a linear head."""

    def __init__(self, features: list[nn.Module], num_features: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.features(images)))
        return scores


class DigitsCNN(ConvNet):
    """Three 3x3 convolutions with BatchNorm, for the 1x8x8 images of handwritten digits.

    Example:
        >>> DigitsCNN()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, width: int = 16) -> None:
        features = [
            *_block(in_channels, width, bias=False),
            *_block(width, 2 * width, bias=False),
            nn.MaxPool2d(2),
            *_block(2 * width, 2 * width, bias=False),
        ]
        super().__init__(features, 2 * width, num_classes)


class VGG(ConvNet):
    """VGG-11 or 16 (Simonyan and Zisserman, 2015) with BatchNorm and one linear layer.

    Example:
        >>> VGG(11, num_classes=100, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])

    Each of five stages halves the image, so images must be at least 32x32. Convolutions have biases, as published,
    although BatchNorm cancels them.
    """

    def __init__(self, depth: int, *, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> None:
        features: list[nn.Module] = []
        channels = in_channels
        for num_convolutions, widening in zip(_CONVOLUTIONS_PER_STAGE[depth], _WIDENING, strict=True):
            for _ in range(num_convolutions):
                features += _block(channels, width * widening, bias=True)
                channels = width * widening
            features.append(nn.MaxPool2d(2))
        super().__init__(features, channels, num_classes)


class Linear(nn.Module):
    """Logistic regression: one linear layer on all pixels.

    Example:
        >>> Linear()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, image_size: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(in_channels * image_size**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(images.flatten(1))
        return scores


class MLP(nn.Sequential):
    """Two hidden layers with BatchNorm, ReLU and dropout.

    Example:
        >>> MLP(13, 3)(torch.zeros(2, 13)).shape
        torch.Size([2, 3])
    """

    WIDTH = 128

    def __init__(self, num_features: int, num_classes: int, *, width: int = WIDTH, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for size in (num_features, width):
            layers += [nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*layers, nn.Linear(width, num_classes))


def _block(in_channels: int, out_channels: int, *, bias: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=bias)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]


Shortcut: TypeAlias = Callable[[int, int, int], nn.Module]
"""Makes the shortcut of a block that changes the shape, from (input channels, output channels, stride)."""


def resnet18(*, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-18 (He et al., 2016) for 32x32 images: a 3x3 stem of stride 1 and no max pool.

    Example:
        >>> resnet18(num_classes=100, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    return ResNet(
        (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels, width=width, shortcut=projection_shortcut
    )


def resnet20(*, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> ResNet:
    """ResNet-20 (He et al., 2016, section 4.2): three stages of three blocks, shortcuts without parameters.

    Example:
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
        self.stem = nn.Sequential(*_block(in_channels, width, bias=False))
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
        # Slices would do, but their gradients have channels first, which makes what comes next thirty times slower.
        subsampled = F.avg_pool2d(inputs, kernel_size=1, stride=self.stride)
        return F.pad(subsampled, (0, 0, 0, 0, 0, self.num_new_channels))


def _convolution(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


_NUM_LEVELS = 4


class UNet(nn.Module):
    """UNet (Ronneberger et al., 2015) with BatchNorm and padded convolutions, so outputs have the images' size.

    Example:
        >>> UNet(num_classes=6, width=8)(torch.zeros(2, 3, 64, 32)).shape
        torch.Size([2, 6, 64, 32])

    Four times max pooling halves the image and the channels double; four times a transposed convolution doubles the
    image, which is concatenated with the features before pooling. Each stage is two 3x3 convolutions.
    """

    multiple = 2**_NUM_LEVELS
    """Height and width of the images must be multiples of this."""

    def __init__(self, *, num_classes: int = 6, in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(_NUM_LEVELS + 1)]
        self.first = _two_blocks(in_channels, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _two_blocks(above, below)) for above, below in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in reversed(pairs))
        self.join = nn.ModuleList(_two_blocks(2 * above, above) for above, _ in reversed(pairs))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.first(_checked(images, self.multiple))
        across = []
        for down in self.down:
            across.append(features)
            features = down(features)
        for up, join in zip(self.up, self.join, strict=True):
            features = join(torch.cat([across.pop(), up(features)], dim=1))
        scores: Tensor = self.head(features)
        return scores


@torch.fx.wrap  # keeps the network traceable despite the check
def _checked(images: Tensor, multiple: int) -> Tensor:
    height, width = images.shape[-2:]
    if height % multiple or width % multiple:
        raise DataError(
            f"UNet got images of {height} x {width}, expected multiples of {multiple}: crop or pad them, as "
            "papa.lab.tasks.segmentation.apply_whole does"
        )
    return images


def _two_blocks(in_channels: int, out_channels: int) -> nn.Sequential:
    first, second = (_block(channels, out_channels, bias=True) for channels in (in_channels, out_channels))
    return nn.Sequential(*first, *second)
