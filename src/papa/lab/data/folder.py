"""Image data sets in class folders: small images are cached decoded, large ones decoded when needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from papa.data import Arrays, Source, Subset
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

LARGEST_CACHED = 96
"""Images with sides up to this number of pixels are cached decoded."""
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


def load_folder(
    name: str,
    root: Path,
    *,
    image_size: int | None,
    test_share: float | None,
    test_folders: Sequence[str] = ("test", "val"),
    largest_cached: float = LARGEST_CACHED,
) -> FolderSet:
    """Load images in `root/train/CLASS` and `root/test/CLASS` (or `val`), or in `root/CLASS` with a test share.

    `image_size` None keeps the size of the files, or 224 if these are large. The first of `test_folders` that exists is
    used. Images with sides above `largest_cached` are decoded when needed.
    """
    train_folder, test_folder = _find_folders(root, test_share, test_folders)
    files = scan_classes(train_folder)
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
            f"test_share is {test_share}, but {root} has its own test images in {test_folder}: leave test_share out"
        )
    if test_folder is None and test_share is None and class_names(train_folder):
        raise DataError(
            f"the folder {root} has no test images, expected {root / 'train' / 'CLASS'} and {root / 'test' / 'CLASS'}: "
            "set test_share, such as 0.2, to split some off"
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
