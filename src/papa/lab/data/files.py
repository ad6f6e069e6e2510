"""Folders with one folder of images per class: listing the images and their classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from papa.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The suffixes of image files, in any case; other files are ignored."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files under a folder, and the class of each."""

    folder: Path
    names: npt.NDArray[np.bytes_]
    """Relative to the folder. One array of bytes, since a million strings would take much more memory."""
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.names[index]))

    def paths(self) -> list[str]:
        return [self.path(index) for index in range(len(self))]


def scan_classes(folder: Path) -> ImageFiles:
    """The images of a folder with one folder per class, sorted by class and name.

    Names that start with a dot are ignored.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: expected one folder of images per class in it")
    classes = class_names(folder)
    if not classes:
        raise DataError(
            f"the folder {folder} has no class folder, expected one folder of images per class, "
            f"such as {folder / 'cat' / '1.png'}"
        )
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(_images_below(os.path.join(folder, name), name))
        if not found:
            raise DataError(
                f"the class folder {folder / name} has no image, expected at least one file that ends in "
                f"{', '.join(EXTENSIONS)}: add images, or remove the folder"
            )
        names += [os.fsencode(image) for image in found]
        labels += [label] * len(found)
    return ImageFiles(folder, np.array(names, dtype=np.bytes_), np.array(labels, dtype=np.int64), classes)


def class_names(folder: Path) -> tuple[str, ...]:
    """The sorted names of the class folders in a folder; none if the folder does not exist."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def check_same_classes(train: ImageFiles, test: ImageFiles) -> None:
    """Raise a `DataError` unless training and test images have the same classes."""
    if train.classes == test.classes:
        return
    untested = sorted(set(train.classes) - set(test.classes))
    untrained = sorted(set(test.classes) - set(train.classes))
    found = [
        f"{folder} has no {some_of(missing)}"
        for folder, missing in ((test.folder, untested), (train.folder, untrained))
        if missing
    ]
    raise DataError(f"the class folders differ: {'; '.join(found)}. Expected the same classes in both folders")


def digest_of(folder: Path, names: Iterable[str], **options: Any) -> str:
    """A digest of files (their names, sizes and modification times) and of options."""
    digest = hashlib.blake2b(repr(sorted(options.items())).encode(), digest_size=16)
    for name in names:
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(
                f"the file {path} cannot be read ({error.strerror}), expected it to exist while it is used"
            ) from error
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return digest.hexdigest()


def _images_below(folder: str, prefix: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _images_below(entry.path, f"{prefix}/{entry.name}")
            elif entry.name.lower().endswith(EXTENSIONS):
                yield f"{prefix}/{entry.name}"


def some_of(values: Sequence[Any]) -> str:
    """The first five values, for messages."""
    shown = ", ".join(map(str, values[:5]))
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"
