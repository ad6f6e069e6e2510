"""Plain convolutional networks: VGG for 32x32 images, and small networks that train within seconds on a CPU."""

from __future__ import annotations

from torch import Tensor, nn

from papa.errors import ConfigError

_CONVOLUTIONS_PER_STAGE = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
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
        >>> import torch
        >>> DigitsCNN()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, width: int = 16) -> None:
        features = [
            *_convolution(in_channels, width, bias=False),
            *_convolution(width, 2 * width, bias=False),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 2 * width, bias=False),
        ]
        super().__init__(features, 2 * width, num_classes)


class VGG(ConvNet):
    """VGG-11, 13, 16 or 19 (Simonyan and Zisserman, 2015) with BatchNorm and one linear layer.

    Example:
        >>> import torch
        >>> VGG(11, num_classes=100, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])

    Each of five stages halves the image, so images must be at least 32x32. Convolutions have biases, as published,
    although BatchNorm cancels them.
    """

    def __init__(self, depth: int, *, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> None:
        if depth not in _CONVOLUTIONS_PER_STAGE:
            depths = ", ".join(str(known) for known in _CONVOLUTIONS_PER_STAGE)
            raise ConfigError(f"VGG got a depth of {depth}, expected one of {depths}")
        features: list[nn.Module] = []
        channels = in_channels
        for num_convolutions, widening in zip(_CONVOLUTIONS_PER_STAGE[depth], _WIDENING, strict=True):
            for _ in range(num_convolutions):
                features += _convolution(channels, width * widening, bias=True)
                channels = width * widening
            features.append(nn.MaxPool2d(2))
        super().__init__(features, channels, num_classes)


class Linear(nn.Module):
    """Logistic regression: one linear layer on all pixels.

    Example:
        >>> import torch
        >>> Linear()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, image_size: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(in_channels * image_size**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(images.flatten(1))
        return scores


def _convolution(in_channels: int, out_channels: int, *, bias: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=bias)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]
