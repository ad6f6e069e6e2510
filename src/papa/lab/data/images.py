"""Image data sets by name, with the properties of their images that networks and augmentation need."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from papa.errors import ConfigError, DataError, did_you_mean
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.digits import load_digits, load_optdigits
from papa.lab.data.files import ImageFiles, class_names, decode_files, digest_of, read_size, scan_classes, some_of
from papa.lab.data.large import DecodedFolder
from papa.lab.data.published import PUBLISHED, load_published
from papa.lab.data.splits import check_labels, limit, split_classes, targets_of
from papa.training.data import Arrays, Data, Source, Subset, hold_out

Numbers: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Training and test images as uint8 `(N, channels, height, width)`, and their properties."""

    train: Source
    test: Source
    classes: tuple[str, ...]
    """The class names, in the order of their labels."""
    channels: int = 3
    image_size: int
    mean: Numbers
    """The mean of each channel, of pixels scaled to [0, 1]."""
    std: Numbers
    crop_padding: int = 0
    """The padding of random crops in training; 0 if the source crops."""
    flip: bool = False
    """Whether to flip training images at random; False if the source flips, or if mirrored images change class."""
    validation: Source | None = None
    """Validation data, if the data set defines it; otherwise a share of the training data is held out."""
    ignore: int | None = None
    """The label of pixels without a class, if there is one label per pixel."""

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def split(self, validation: float, *, seed: int) -> Data:
        """Training, validation and test data; the split depends on the seed alone."""
        train, held_out = self.train, self.validation
        if held_out is None:
            train, held_out = hold_out(train, validation, seed=seed)
        return Data(train=train, validation=held_out, test=self.test)


_MEAN_AND_STD: dict[str, tuple[Numbers, Numbers]] = {
    "digits": ((0.305,), (0.376,)),
    "optdigits": ((0.0,), (1.0 / 255.0,)),  # keeps the counts from 0 to 16 of the files
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_NEVER_FLIPPED = ("digits", "optdigits", "mnist")
_NUM_MEASURED = 50_000


FOLDERS = ("imagenet", "images")
"""Data sets in class folders, whose images may be large."""
IMAGE_SETS = ("digits", "optdigits", *PUBLISHED, *FOLDERS)
"""The names of image data sets with one class for each image; `images` is your own."""
LARGEST_CACHED = 96
"""Images with sides up to this number of pixels are cached decoded."""
IMAGENET_SIZE, OWN_SIZE = 224, 64
"""Height and width of ImageNet's images, and of your own if these are large or no squares of one size."""
OWN_TEST_SHARE = 0.2
"""For your own images without test images."""
NUM_SAMPLED = 500
"""The number of images whose size is looked at, at most."""


def load_images(
    name: str,
    *,
    root: str | Path = "data",
    image_size: int | None = None,
    max_train: int | None = None,
    max_test: int | None = None,
    test_share: float | None = None,
) -> ImageSet:
    """Load an image data set by name.

    Example:
        >>> images = load_images("digits", max_train=100)
        >>> len(images.train), images.num_classes, images.image_size
        (100, 10, 8)

    Args:
        name: `digits`, `optdigits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, `imagenet`, or `images` for your
            own images in class folders.
        root: the folder of the data. CIFAR as torchvision stores it, or as class folders in `root/cifar100/train` and
            `root/cifar100/test`; ImageNet and your own images as class folders in `root/train` and `root/val` or
            `root/test`, your own also in `root` itself; optdigits as in `load_optdigits`.
        image_size: the height and width to which ImageNet and your own images are resized when they are decoded; None
            for 224, and for the size of your own images if they are small squares, else 64.
        max_train: the largest number of training images; a fixed selection, balanced over classes.
        max_test: the largest number of test images.
        test_share: the share of each class to use for testing, for your own images without test images; None for 0.2.

    Small images (up to 96 pixels) are decoded once into a file that all processes map (`papa.lab.data.cache`).
    """
    folder = Path(root)
    if name not in IMAGE_SETS:
        raise ConfigError(f"there is no data set {name}: {did_you_mean(name, IMAGE_SETS)}")
    if test_share is not None and name != "images":
        raise ConfigError(f"--data.test-share is {test_share}, but {name} has its own test images: leave it out")
    if image_size is not None and name not in FOLDERS:
        raise ConfigError(f"image_size is {image_size}, but {name} is decoded as it is: resize its batches")
    if name == "images":
        images = _load_folder(name, folder, image_size, test_folders=("test", "val"), test_share=test_share)
    elif name == "imagenet":
        folder = folder / name if class_names(folder / name / "train") else folder
        # ImageNet's `test` has no labels.
        images = _load_folder(name, folder, image_size or IMAGENET_SIZE, test_folders=("val",))
    elif name in PUBLISHED:
        images = _load_published(name, folder)
    else:
        train, test = load_digits() if name == "digits" else load_optdigits(folder)
        images = _small_set(name, train, test, tuple("0123456789"))
    for part in (images.train, images.test):
        check_labels(targets_of(part), images.num_classes, name)
    return dataclasses.replace(
        images,
        train=limit(images.train, max_train, part="train"),
        test=limit(images.test, max_test, part="test"),
    )


def _load_published(name: str, root: Path) -> ImageSet:
    """A data set of torchvision; CIFAR may also be stored as class folders."""
    expected = {"cifar10": 10, "cifar100": 100}.get(name)
    if expected and not (root / PUBLISHED[name][1]).is_dir():
        for folder in (root / name, root / name.replace("cifar", "cifar-")):
            found = len(class_names(folder / "train"))
            if found == expected:
                return _load_folder(name, folder, None, test_folders=("test",))
            if found:
                raise DataError(
                    f"{name} in {folder} has {found} class folders, expected {expected}: part of it is missing, or it "
                    "is another set"
                )
    return _small_set(name, *load_published(name, root))


def _load_folder(
    name: str, root: Path, image_size: int | None, *, test_folders: Sequence[str], test_share: float | None = None
) -> ImageSet:
    """Images in `root/train/CLASS` and the first of `test_folders` that exists, or your own in `root/CLASS`."""
    if not root.is_dir():
        raise DataError(
            f"--data.root is {root}, and there is no such folder: expected one folder of images per class in it, or in "
            f"its folders train and {test_folders[0]}"
        )
    # Where classes are in `root` itself, `test` and `val` are classes.
    train_folder = root / "train" if class_names(root / "train") else root
    test_folder = next((root / part for part in test_folders if (root / part).is_dir()), None)
    test_folder = None if train_folder == root else test_folder
    files = scan_classes(train_folder)
    size = image_size or _common_size(files) or OWN_SIZE
    is_large = size > LARGEST_CACHED

    def source(files: ImageFiles, part: str) -> Arrays | DecodedFolder:
        if is_large:
            return DecodedFolder(files, image_size=size)
        return cached_images(
            f"{name}-{part}-{size}",
            folder=root,
            digest=digest_of(files.folder, map(os.fsdecode, files.names), image_size=size),
            decode=lambda: Decoded(decode_files(files.paths(), size), files.labels, files.classes),
        )[0]

    train: Source
    test: Source
    if test_folder is not None:
        if test_share is not None:
            raise ConfigError(
                f"--data.test-share is {test_share}, but {root} has its own test images in {test_folder}: leave it out"
            )
        test_files = scan_classes(test_folder)
        _check_same_classes(files, test_files)
        train, test = source(files, "train"), source(test_files, "test")
    elif name == "images":
        every = source(files, "train")
        places, test_places = split_classes(every.targets, test_share or OWN_TEST_SHARE)
        train, test = Subset(every, places), Subset(every, test_places)
    else:
        raise DataError(f"the folder {root} has no test images, expected {root / test_folders[0] / 'CLASS'}")
    if not is_large:
        return _small_set(name, train, test, files.classes)
    mean, std = _MEAN_AND_STD["imagenet"]
    return ImageSet(train=train, test=test, classes=files.classes, image_size=size, mean=mean, std=std)


def _common_size(files: ImageFiles) -> int | None:
    """The side of the images if they are small squares of one size, as far as a sample shows."""
    places = range(0, len(files), -(-len(files) // NUM_SAMPLED))
    sizes = {read_size(files.path(place)) for place in places}
    width, height = next(iter(sizes))
    return width if len(sizes) == 1 and width == height <= LARGEST_CACHED else None


def _check_same_classes(train: ImageFiles, test: ImageFiles) -> None:
    missing = [
        f"{part.folder} has no {some_of(names)}"
        for part, other in ((test, train), (train, test))
        if (names := sorted(set(other.classes) - set(part.classes)))
    ]
    if missing:
        raise DataError(f"the class folders differ: {'; '.join(missing)}. Expected the same classes in both folders")


def _small_set(name: str, train: Source, test: Source, classes: tuple[str, ...]) -> ImageSet:
    mean, std = _MEAN_AND_STD[name] if name in _MEAN_AND_STD else measure(train)
    channels, image_size, _ = train.batch(torch.tensor([0]))[0].shape[1:]
    return ImageSet(
        train=train,
        test=test,
        classes=classes,
        channels=channels,
        image_size=image_size,
        mean=mean,
        std=std,
        # 4 for CIFAR's 32 pixels. The strokes of optdigits fill the 8 pixels, and a linear network sees shifts.
        crop_padding=0 if name == "optdigits" else image_size // 8,
        flip=name not in _NEVER_FLIPPED,
    )


def measure(source: Source) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel, of pixels scaled to [0, 1], over at most 50,000 images.

    Example:
        >>> measure(Arrays(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2), torch.zeros(1)))
        ((0.5,), (0.5,))
    """
    measured = torch.linspace(0, len(source) - 1, min(len(source), _NUM_MEASURED), dtype=torch.float64).long()
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for indices in measured.split(512):  # type: ignore[no-untyped-call]
        pixels = source.batch(indices)[0].transpose(0, 1).flatten(1).float() / 255.0
        count += pixels.shape[1]
        total = total + pixels.sum(1).double()
        squares = squares + pixels.square().sum(1).double()
    mean = total / count
    # Images of a single colour have a standard deviation of 0: divide by 1 instead.
    std = (squares / count - mean.square()).clamp(min=0.0).sqrt()
    std = torch.where(std > 1e-4, std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())
