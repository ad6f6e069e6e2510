"""Image data sets in class folders: small images are cached decoded, large ones decoded when needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from papa.errors import ConfigError, DataError
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.files import (
    ImageFiles,
    check_same_classes,
    class_names,
    decode_files,
    digest_of,
    read_size,
    scan_classes,
)
from papa.lab.data.large import DecodedFolder
from papa.lab.data.splits import split_classes
from papa.training.data import Arrays, Source, Subset

LARGEST_CACHED = 96
"""Images with sides up to this number of pixels are cached decoded."""
NUM_SAMPLED = 500
"""The number of images whose size is looked at, at most."""
LARGE_SIZE = 224
"""The default height and width of large images."""


@dataclass(frozen=True)
class FolderSet:
    """Training and test images from class folders."""

    train: Source
    test: Source
    classes: tuple[str, ...]
    image_size: int
    large: bool
    """Whether the sources decode, crop and flip images when they are read."""


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What is chosen where the images leave it open and no option decides."""

    image_size: int = 64
    """For images that are no squares of one size, or larger than `LARGEST_CACHED`."""
    test_share: float = 0.2
    """For a folder without test images."""


def load_folder(
    name: str,
    root: Path,
    *,
    image_size: int | None,
    test_share: float | None,
    test_folders: Sequence[str] = ("test", "val"),
    largest_cached: float = LARGEST_CACHED,
    fallback: Fallback | None = None,
) -> FolderSet:
    """Load images in `root/train/CLASS` and `root/test/CLASS` (or `val`), or in `root/CLASS` with a test share.

    `image_size` None keeps the size of the files, or 224 if these are large. The first of `test_folders` that exists is
    used. Images with sides above `largest_cached` are decoded when needed. With a `fallback`, images of any sizes and a
    folder without test images are no errors.
    """
    if fallback is not None and test_share is None and not _has_test_images(root, test_folders):
        test_share = fallback.test_share
    train_folder, test_folder = _find_folders(root, test_share, test_folders)
    files = scan_classes(train_folder)
    if fallback is not None and image_size is None and not _are_small_squares(files, largest_cached):
        image_size = fallback.image_size
    native_side = max(read_size(files.path(0)))
    large = (native_side if image_size is None else image_size) > largest_cached
    size = image_size if image_size is not None or not large else LARGE_SIZE
    if test_folder is not None:
        test_files = scan_classes(test_folder)
        check_same_classes(files, test_files)
        train: Source = _source(f"{name}-train", files, root, size, large)
        test: Source = _source(f"{name}-test", test_files, root, size, large)
    else:
        assert test_share is not None
        source = _source(f"{name}-train", files, root, size, large)
        train_indices, test_indices = split_classes(source.targets, test_share)
        train, test = Subset(source, train_indices), Subset(source, test_indices)
    return FolderSet(train, test, files.classes, size or native_side, large)


def _has_test_images(root: Path, test_folders: Sequence[str]) -> bool:
    return bool(class_names(root / "train")) and any((root / part).is_dir() for part in test_folders)


def _are_small_squares(files: ImageFiles, largest: float) -> bool:
    """Whether images are squares of one size that is not large, as far as a sample shows."""
    places = range(0, len(files), -(-len(files) // NUM_SAMPLED))
    sizes = {read_size(files.path(place)) for place in places}
    width, height = next(iter(sizes))
    return len(sizes) == 1 and width == height <= largest


def _find_folders(root: Path, test_share: float | None, test_folders: Sequence[str]) -> tuple[Path, Path | None]:
    """The folder of training images, and that of test images if there is one."""
    if not root.is_dir():
        raise DataError(
            f"there is no folder {root}: expected images in {root / 'train' / 'CLASS'} and {root / 'test' / 'CLASS'}, "
            f"or in {root / 'CLASS'}"
        )
    train_folder = root / "train" if class_names(root / "train") else root
    test_folder = next((root / part for part in test_folders if (root / part).is_dir()), None)
    if train_folder == root:
        test_folder = None  # here, `test` and `val` are classes
    if test_folder is not None and test_share is not None:
        raise ConfigError(
            f"--data.test-share is {test_share}, but {root} has its own test images in {test_folder}: leave it out"
        )
    if test_folder is None and test_share is None and class_names(train_folder):
        raise DataError(
            f"the folder {root} has no test images, expected {root / 'train' / 'CLASS'} and {root / 'test' / 'CLASS'}: "
            "set --data.test-share, such as 0.2, to split some off"
        )
    return train_folder, test_folder


def _source(name: str, files: ImageFiles, root: Path, image_size: int | None, large: bool) -> Arrays | DecodedFolder:
    if large:
        assert image_size is not None
        return DecodedFolder(files, image_size=image_size)
    source, _ = cached_images(
        f"{name}-{image_size or 'native'}",
        folder=root,
        digest=digest_of(files.folder, map(os.fsdecode, files.names), image_size=image_size),
        decode=lambda: Decoded(files.labels, files.classes, decode_files(files.paths(), image_size)),
    )
    return source
