"""UNet for segmentation."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from papa.errors import DataError

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
        self.first = _two_convolutions(in_channels, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _two_convolutions(above, below)) for above, below in pairs
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in reversed(pairs))
        self.join = nn.ModuleList(_two_convolutions(2 * above, above) for above, _ in reversed(pairs))
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
            "papa.lab.tasks.apply.apply_whole does"
        )
    return images


def _two_convolutions(in_channels: int, out_channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU()]
    return nn.Sequential(*layers)
