"""Image data sets by name, with the properties of their images that networks and augmentation need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from papa.errors import ConfigError, DataError, did_you_mean
from papa.lab.data.digits import load_digits, load_optdigits
from papa.lab.data.files import class_names, resize_arrays
from papa.lab.data.folder import LARGE_SIZE, Fallback, FolderSet, load_folder
from papa.lab.data.native import NATIVE
from papa.lab.data.splits import check_labels, limit, targets_of
from papa.training.data import Arrays, Data, Source, hold_out

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


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of `load_images` that loaders need."""

    root: Path
    image_size: int | None
    test_share: float | None
    download: bool


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN_AND_STD: dict[str, tuple[Numbers, Numbers]] = {
    "digits": ((0.305,), (0.376,)),
    "optdigits": ((0.0,), (1.0 / 255.0,)),  # keeps the counts from 0 to 16 of the files
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
}
_CIFAR_CLASSES = {"cifar10": 10, "cifar100": 100}
_NEVER_FLIPPED = ("digits", "optdigits", "mnist")
_NUM_MEASURED = 50_000


def load_images(
    name: str,
    *,
    root: str | Path = "data",
    image_size: int | None = None,
    max_train: int | None = None,
    max_test: int | None = None,
    test_share: float | None = None,
    download: bool = True,
) -> ImageSet:
    """Load an image data set by name.

    Example:
        >>> images = load_images("digits", max_train=100)
        >>> len(images.train), images.num_classes, images.image_size
        (100, 10, 8)

    Args:
        name: `digits`, `optdigits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, `imagenet`, or `folder` for your
            own images, or `images` for the same with defaults that fit them (`papa.lab.data.folder.Fallback`).
        root: the folder of the data. CIFAR as torchvision stores it, or as class folders in `root/cifar100/train` and
            `root/cifar100/test`; ImageNet and your own images as class folders in `root/train` and `root/val` or
            `root/test`, your own also in `root` itself; optdigits as in `load_optdigits`.
        image_size: resize images to this height and width (bicubic); None for their own size, or 224 for large images.
        max_train: the largest number of training images; a fixed selection, balanced over classes.
        max_test: the largest number of test images.
        test_share: the share of each class to use for testing, for your own images without test images.
        download: whether torchvision may download missing data.

    Small images (up to 96 pixels) are decoded once into a file that all processes map (`papa.lab.data.cache`).
    """
    if name not in LOADERS:
        raise ConfigError(f"there is no data set {name}: {did_you_mean(name, LOADERS)}")
    if test_share is not None and name not in OWN:
        raise ConfigError(f"--data.test-share is {test_share}, but {name} has its own test images: leave it out")
    options = _Options(root=Path(root), image_size=image_size, test_share=test_share, download=download)
    images = LOADERS[name](name, options)
    for part in (images.train, images.test):
        check_labels(targets_of(part), images.num_classes, name)
    return dataclasses.replace(
        images,
        train=limit(images.train, max_train, part="train"),
        test=limit(images.test, max_test, part="test"),
    )


def _digits(name: str, options: _Options) -> ImageSet:
    parts = load_digits() if name == "digits" else load_optdigits(options.root)
    train, test = (_resized(part, options.image_size) for part in parts)
    images = _small_set(name, train, test, tuple("0123456789"))
    # optdigits are not shifted: their strokes fill the 8 pixels, and a linear network is not invariant to shifts.
    return images if name == "digits" else dataclasses.replace(images, crop_padding=0)


def _native(name: str, options: _Options) -> ImageSet:
    """A data set of torchvision; CIFAR may also be stored as class folders."""
    native, root = NATIVE[name], options.root
    if not native.is_in(root):
        is_cifar = name in _CIFAR_CLASSES
        for folder in (root / name, root / name.replace("cifar", "cifar-")):
            if is_cifar and class_names(folder / "train"):
                return _cifar_folder(name, folder, options)
        if not options.download:
            folders = f", or class folders in {root / name / 'train'} and {root / name / 'test'}" if is_cifar else ""
            raise DataError(
                f"{name} is not in {root}: {native.expected_files(root)}{folders}. Set --data.root to where it is, or "
                "allow the download"
            )
        native.fetch(root)
    train, classes = native.load(root, train=True, image_size=options.image_size)
    test, _ = native.load(root, train=False, image_size=options.image_size)
    return _small_set(name, train, test, classes)


def _cifar_folder(name: str, folder: Path, options: _Options) -> ImageSet:
    num_found, expected = len(class_names(folder / "train")), _CIFAR_CLASSES[name]
    if num_found != expected:
        raise DataError(
            f"{name} in {folder} has {num_found} class folders, expected {expected}: part of it is missing, "
            "or it is another set"
        )
    # Cached at any size, as images of the original files are.
    found = load_folder(name, folder, image_size=options.image_size, test_share=None, largest_cached=math.inf)
    return _folder_set(name, found)


def _imagenet(name: str, options: _Options) -> ImageSet:
    root = options.root / name if class_names(options.root / name / "train") else options.root
    size = options.image_size or LARGE_SIZE
    # ImageNet's `test` has no labels.
    return _folder_set(name, load_folder(name, root, image_size=size, test_share=None, test_folders=("val",)))


def _own_images(name: str, options: _Options) -> ImageSet:
    found = load_folder(
        name,
        options.root,
        image_size=options.image_size,
        test_share=options.test_share,
        fallback=Fallback() if name == "images" else None,
    )
    return _folder_set(name, found)


OWN = ("folder", "images")
"""A user's own class folders."""
LOADERS: dict[str, Callable[[str, _Options], ImageSet]] = {
    "digits": _digits,
    "optdigits": _digits,
    "cifar10": _native,
    "cifar100": _native,
    "mnist": _native,
    "fashion-mnist": _native,
    "imagenet": _imagenet,
    "folder": _own_images,
    "images": _own_images,
}


def _folder_set(name: str, found: FolderSet) -> ImageSet:
    if not found.large:
        return _small_set(name, found.train, found.test, found.classes)
    return ImageSet(
        train=found.train,
        test=found.test,
        classes=found.classes,
        image_size=found.image_size,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _small_set(name: str, train: Source, test: Source, classes: tuple[str, ...]) -> ImageSet:
    mean, std = _MEAN_AND_STD[name] if name in _MEAN_AND_STD else measure(train)
    shapes = {tuple(part.batch(torch.tensor([0]))[0].shape[1:]) for part in (train, test)}
    if len(shapes) > 1:
        found = " and ".join(" x ".join(map(str, shape)) for shape in sorted(shapes))
        raise DataError(f"training and test images differ in size ({found}), expected one: set --data.image-size")
    channels, image_size, _ = shapes.pop()
    return ImageSet(
        train=train,
        test=test,
        classes=classes,
        channels=channels,
        image_size=image_size,
        mean=mean,
        std=std,
        crop_padding=image_size // 8,  # 4 for CIFAR's 32 pixels
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


def _resized(part: Arrays, image_size: int | None) -> Arrays:
    pixels = part.inputs[:, 0].numpy()
    resized = [torch.from_numpy(chunk) for chunk in resize_arrays(pixels, image_size)]
    return Arrays(torch.cat(resized), part.targets)
