"""Small networks, to train a whole population within seconds on a CPU."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Three 3x3 convolutions with BatchNorm, for the 1x8x8 images of handwritten digits.

    Example:
        >>> import torch
        >>> DigitsCNN()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])

    Args:
        width: channels of the first convolution; the other two have twice as many.
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 1, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(in_channels, width),
            *_block(width, 2 * width),
            nn.MaxPool2d(2),
            *_block(2 * width, 2 * width),
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.pool(self.features(images)))
        return scores


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
        """Class scores."""
        scores: Tensor = self.head(images.flatten(1))
        return scores


def _block(in_channels: int, out_channels: int) -> list[nn.Module]:
    # BatchNorm adds a bias, so the convolution needs none.
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]
