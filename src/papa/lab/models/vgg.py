"""VGG with BatchNorm for 32x32 images: five stages of convolutions and one linear layer."""

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


class VGG(nn.Module):
    """VGG-11, 13, 16 or 19 (Simonyan and Zisserman, 2015) with BatchNorm and one linear layer.

    Example:
        >>> import torch
        >>> VGG(11, num_classes=100, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])

    Each stage halves the image, so images must be at least 32x32. Convolutions have biases, as published, although
    BatchNorm cancels them.

    Args:
        depth: 11, 13, 16 or 19, which counts three linear layers, as in the original.
        width: channels of the first stage; the published networks have 64.
    """

    def __init__(self, depth: int, *, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        if depth not in _CONVOLUTIONS_PER_STAGE:
            depths = ", ".join(str(known) for known in _CONVOLUTIONS_PER_STAGE)
            raise ConfigError(f"VGG got a depth of {depth}, expected one of {depths}")
        layers: list[nn.Module] = []
        channels = in_channels
        for num_convolutions, widening in zip(_CONVOLUTIONS_PER_STAGE[depth], _WIDENING, strict=True):
            for _ in range(num_convolutions):
                convolution = nn.Conv2d(channels, width * widening, kernel_size=3, padding=1)
                layers += [convolution, nn.BatchNorm2d(width * widening), nn.ReLU()]
                channels = width * widening
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.pool(self.features(images)))
        return scores
