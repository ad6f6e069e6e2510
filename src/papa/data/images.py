"""Image data by name: the examples, and what a network needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from papa.data.digits import load_digits
from papa.data.source import Data, Source, hold_out
from papa.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images as uint8 `(N, channels, height, width)`, and the constants that belong to them."""

    train: Source
    test: Source
    num_classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    """Per channel, of pixels scaled to [0, 1]."""
    std: tuple[float, ...]
    crop_padding: int
    """How far a training image may be shifted."""
    flip: bool
    """Whether a mirrored image is still of its class."""

    def split(self, validation: float, *, seed: int) -> Data:
        """Training, validation and test data; the same split for all members and methods of a seed."""
        train, held_out = hold_out(self.train, validation, seed=seed)
        return Data(train=train, validation=held_out, test=self.test)


def digits() -> ImageSet:
    """scikit-learn's handwritten digits."""
    train, test = load_digits()
    return ImageSet(
        train=train,
        test=test,
        num_classes=10,
        channels=1,
        image_size=8,
        mean=(0.305,),
        std=(0.376,),
        crop_padding=1,
        flip=False,
    )


LOADERS: dict[str, Callable[[], ImageSet]] = {"digits": digits}


def load_images(name: str) -> ImageSet:
    """An image set by its name."""
    if name not in LOADERS:
        raise ConfigError(f"there is no data set {name}: {did_you_mean(name, LOADERS)}")
    return LOADERS[name]()
