"""Image data by name: the examples, and what a network needs to know of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from papa.data import Arrays, Data, Source, hold_out
from papa.errors import ConfigError, DataError, did_you_mean
from papa.lab.data.decode import resize_arrays
from papa.lab.data.digits import load_digits
from papa.lab.data.files import class_names
from papa.lab.data.folder import LARGE_SIZE, FolderSet, load_folder
from papa.lab.data.native import NATIVE
from papa.lab.data.optdigits import load_optdigits
from papa.lab.data.splits import check_labels, limit, targets_of

Numbers: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images as uint8 `(N, channels, height, width)`, and the constants that belong to them."""

    train: Source
    """Read by `stream_batches` for training: large images are then cropped and mirrored as they are decoded."""
    test: Source
    num_classes: int
    classes: tuple[str, ...] = ()
    """The names of the classes, in the order of their labels."""
    channels: int
    image_size: int
    mean: Numbers
    """Per channel, of pixels scaled to [0, 1]."""
    std: Numbers
    crop_padding: int
    """How far a training image may be shifted; 0 where the source crops by itself."""
    flip: bool
    """Whether a mirrored image is still of its class; False where the source mirrors by itself."""
    validation: Source | None = None
    """Held out from training, where the set says what; else a share of the training images is."""
    ignore: int | None = None
    """Where every pixel has a label: the label of those without a class."""

    def split(self, validation: float, *, seed: int) -> Data:
        """Training, validation and test data; the same split for all members and methods of a seed."""
        if self.validation is not None:
            return Data(train=self.train, validation=self.validation, test=self.test)
        train, held_out = hold_out(self.train, validation, seed=seed)
        return Data(train=train, validation=held_out, test=self.test)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    root: Path
    image_size: int | None
    test_share: float | None
    download: bool


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOMENTS: dict[str, tuple[Numbers, Numbers]] = {
    "digits": ((0.305,), (0.376,)),
    "optdigits": ((0.0,), (1.0 / 255.0,)),  # the counts of the files, 0 to 16, as they are
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
}
_CIFAR_CLASSES = {"cifar10": 10, "cifar100": 100}
_UNLIKE_THEIR_MIRROR_IMAGE = ("digits", "optdigits", "mnist")
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
    """An image set by its name.

    Example:
        >>> images = load_images("digits", max_train=100)
        >>> len(images.train), images.num_classes, images.image_size
        (100, 10, 8)

    Args:
        name: `digits`, `optdigits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, `imagenet`, or `folder` for your
            own images.
        root: where the data is. CIFAR as torchvision keeps it, or as class folders in `root/cifar100/train` and
            `root/cifar100/test`; ImageNet and your own as class folders in `root/train` and `root/val` or `root/test`,
            your own also in `root` itself. The UCI optical digits as `load_optdigits` reads them.
        image_size: the side of the images, resized once (bicubic); None for their own, or 224 when they are large.
        max_train: train on at most so many images, a fixed draw that is even over the classes.
        max_test: test on at most so many.
        test_share: the share of each class to split off for testing, for a `folder` that has no test images.
        download: whether to download what torchvision can, when it is missing.

    Small images (up to 96 pixels) are decoded once into a file in `root/.papa-cache` that all processes map.
    """
    if name not in LOADERS:
        raise ConfigError(f"there is no data set {name}: {did_you_mean(name, LOADERS)}")
    if image_size is not None and image_size < 1:
        raise ConfigError(f"image_size is {image_size}, expected at least 1, or None for the images' own")
    if test_share is not None and name != "folder":
        raise ConfigError(f"test_share is {test_share}, but {name} has test images of its own: leave test_share out")
    request = Request(root=Path(root), image_size=image_size, test_share=test_share, download=download)
    images = LOADERS[name](name, request)
    for part in (images.train, images.test):
        check_labels(targets_of(part), images.num_classes, name)
    return dataclasses.replace(
        images,
        train=limit(images.train, max_train, part="train"),
        test=limit(images.test, max_test, part="test"),
    )


def _digits(name: str, request: Request) -> ImageSet:
    train, test = (_resized(part, request.image_size) for part in load_digits())
    return _small_set(name, train, test, tuple("0123456789"))


def _optdigits(name: str, request: Request) -> ImageSet:
    train, test = (_resized(part, request.image_size) for part in load_optdigits(request.root))
    # Taken as they are: the strokes fill the 8 pixels, and a network without convolutions knows no shifts.
    return dataclasses.replace(_small_set(name, train, test, tuple("0123456789")), crop_padding=0)


def _native(name: str, request: Request) -> ImageSet:
    """A set that torchvision knows; CIFAR may also be there as class folders."""
    native, root = NATIVE[name], request.root
    if not native.is_in(root):
        if name in _CIFAR_CLASSES:
            for folder in (root / name, root / name.replace("cifar", "cifar-")):
                if class_names(folder / "train"):
                    return _cifar_folder(name, folder, request)
        if not request.download:
            as_folders = (
                f", or class folders in {root / name / 'train'} and {root / name / 'test'}"
                if name in _CIFAR_CLASSES
                else ""
            )
            raise DataError(
                f"{name} is not in {root}: {native.expected_files(root)}{as_folders}. Set root to where it is, or "
                "allow the download"
            )
        native.fetch(root)
    train, classes = native.load(root, train=True, image_size=request.image_size)
    test, _ = native.load(root, train=False, image_size=request.image_size)
    return _small_set(name, train, test, classes)


def _imagenet(name: str, request: Request) -> ImageSet:
    inside = request.root / name
    found = load_folder(
        name,
        inside if class_names(inside / "train") else request.root,
        image_size=request.image_size or LARGE_SIZE,
        test_share=None,
        test_folders=("val",),  # ImageNet's own `test` has no labels
    )
    return _folder_set(name, found)


def _own_folder(name: str, request: Request) -> ImageSet:
    found = load_folder(name, request.root, image_size=request.image_size, test_share=request.test_share)
    return _folder_set(name, found)


LOADERS: dict[str, Callable[[str, Request], ImageSet]] = {
    "digits": _digits,
    "optdigits": _optdigits,
    "cifar10": _native,
    "cifar100": _native,
    "mnist": _native,
    "fashion-mnist": _native,
    "imagenet": _imagenet,
    "folder": _own_folder,
}


def _cifar_folder(name: str, folder: Path, request: Request) -> ImageSet:
    num_found, expected = len(class_names(folder / "train")), _CIFAR_CLASSES[name]
    if num_found != expected:
        raise DataError(
            f"{name} in {folder} has {num_found} class folders, expected {expected}: part of it is missing, "
            "or it is another set"
        )
    # Kept decoded at any size, as from the original files.
    found = load_folder(name, folder, image_size=request.image_size, test_share=None, largest_cached=math.inf)
    return _folder_set(name, found)


def _folder_set(name: str, found: FolderSet) -> ImageSet:
    return _large_set(found) if found.large else _small_set(name, found.train, found.test, found.classes)


def _small_set(name: str, train: Source, test: Source, classes: tuple[str, ...]) -> ImageSet:
    mean, std = _MOMENTS[name] if name in _MOMENTS else measure(train)
    shapes = {tuple(part.batch(torch.tensor([0]))[0].shape[1:]) for part in (train, test)}
    if len(shapes) > 1:
        found = " and ".join(" x ".join(map(str, shape)) for shape in sorted(shapes))
        raise DataError(f"training and test images differ in size ({found}), expected one: set image_size")
    channels, image_size, _ = shapes.pop()
    return ImageSet(
        train=train,
        test=test,
        num_classes=len(classes),
        classes=classes,
        channels=channels,
        image_size=image_size,
        mean=mean,
        std=std,
        crop_padding=image_size // 8,  # 4 pixels of CIFAR's 32
        flip=name not in _UNLIKE_THEIR_MIRROR_IMAGE,
    )


def _large_set(found: FolderSet) -> ImageSet:
    return ImageSet(
        train=found.train,
        test=found.test,
        num_classes=len(found.classes),
        classes=found.classes,
        channels=3,
        image_size=found.image_size,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        crop_padding=0,
        flip=False,
    )


def measure(source: Source) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation per channel of pixels scaled to [0, 1], over at most 50,000 images.

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
    # Images of a single colour have no spread; dividing by 1 leaves them as they are.
    std = (squares / count - mean.square()).clamp(min=0.0).sqrt()
    std = torch.where(std > 1e-4, std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def _resized(part: Arrays, image_size: int | None) -> Arrays:
    pixels = part.inputs[:, 0].numpy()
    resized = [torch.from_numpy(chunk) for chunk in resize_arrays(pixels, image_size)]
    return Arrays(torch.cat(resized), part.targets)
