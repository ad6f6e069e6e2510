"""Images that a finished run has not seen, decoded as its own images were."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from papa.errors import DataError
from papa.lab.data.files import (
    EXTENSIONS,
    images_below,
    in_threads,
    pillow,
    read_image,
    resize_and_crop,
    scan_classes,
    some_of,
    to_pixels,
)
from papa.lab.data.large import CROP_SHARE


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """From image files to uint8 images."""

    image_size: int
    channels: int
    """3 for colours, 1 for grey."""
    is_large: bool
    """Whether the run's images were large, of which evaluation crops the middle more closely."""

    def decode(self, paths: Sequence[str]) -> Tensor:
        """The images `(N, channels, height, width)`, decoded by threads."""
        size, module = self.image_size, pillow()
        pixels = np.empty((len(paths), self.channels, size, size), dtype=np.uint8)

        def one(path: str, out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
            image = read_image(path)
            image = image if self.channels == 3 else image.convert("L")
            if self.is_large:
                shorter, resample = int(size / CROP_SHARE), module.BILINEAR
            else:
                shorter, resample = size, module.BICUBIC
            to_pixels(resize_and_crop(image, shorter_side=shorter, size=size, resample=resample), out)

        in_threads(one, paths, pixels)
        return torch.from_numpy(pixels)


class GivenImages:
    """A `Source` of the images in class folders, labelled by the classes of a run."""

    def __init__(self, folder: Path, classes: Sequence[str], decoder: Decoder) -> None:
        files = scan_classes(folder)
        unknown = [name for name in files.classes if name not in classes]
        if unknown:
            raise DataError(
                f"the folder {folder} has the classes {some_of(unknown)}, which the run does not have: expected some "
                f"of {some_of(classes)}"
            )
        self.files, self.decoder = files, decoder
        labels = torch.tensor([list(classes).index(name) for name in files.classes])
        self.targets = labels[torch.from_numpy(files.labels)]

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        return self.decoder.decode([self.files.path(index) for index in indices.tolist()]), self.targets[indices]


def find_images(paths: Sequence[Path]) -> list[str]:
    """Image files: those that are named, and all those in the folders that are named, sorted by folder and name."""
    found: dict[str, None] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(images_below(str(path), str(path)))
            if not inside:
                raise DataError(f"the folder {path} has no image, expected files that end in {', '.join(EXTENSIONS)}")
            found |= dict.fromkeys(map(os.path.normpath, inside))
        elif path.exists():
            found[str(path)] = None
        else:
            raise DataError(f"there is no file or folder {path}")
    return list(found)
