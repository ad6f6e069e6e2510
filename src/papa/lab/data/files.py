"""Image files: finding those of each class, and decoding, resizing and cropping them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from papa.errors import DataError
from papa.packages import require

if TYPE_CHECKING:
    from PIL import Image


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
        found = sorted(images_below(os.path.join(folder, name), name))
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


def images_below(folder: str, prefix: str) -> Iterator[str]:
    """The image files in a folder and in the folders in it, with the prefix instead of its path."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from images_below(entry.path, f"{prefix}/{entry.name}")
            elif entry.name.lower().endswith(EXTENSIONS):
                yield f"{prefix}/{entry.name}"


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


def some_of(values: Sequence[Any]) -> str:
    """The first five values, for messages."""
    shown = ", ".join(map(str, values[:5]))
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"


Pixels: TypeAlias = npt.NDArray[np.uint8]
"""Images as bytes, of shape (N, channels, height, width)."""

CROP_SHARE = 0.875
"""The share of a large image's shorter side that evaluation crops: 224 of 256 pixels."""
MAX_PIXELS = 1 << 26
"""More than any image has after its shorter side was resized: a narrow one of few bytes could fill the memory."""
MAX_THREADS = 16


def pillow() -> Any:
    """The module `PIL.Image`."""
    require("PIL")
    from PIL import Image

    return Image


def num_cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def opened_image(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    """An image file that Pillow has opened; whatever it raises about the file is a `DataError`."""
    module = pillow()
    try:
        with module.open(path) as image:
            yield image
    except Exception as error:  # a damaged file makes Pillow raise anything
        raise DataError(
            f"the image {path} cannot be decoded ({type(error).__name__}: {error}), expected a complete image file: "
            "replace it, or remove it"
        ) from error


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """An image file as RGB."""
    with opened_image(path) as image:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Width and height of an image file, without decoding it."""
    with opened_image(path) as image:
        width, height = image.size
        return width, height


def resize_and_crop(image: Image.Image, *, shorter_side: int, size: int, resample: int) -> Image.Image:
    """Resize the shorter side (antialiased), and crop the middle square."""
    width, height = image.size
    if min(width, height) != shorter_side:
        if width <= height:
            width, height = shorter_side, int(shorter_side * height / width)
        else:
            width, height = int(shorter_side * width / height), shorter_side
        if width * height > MAX_PIXELS:
            raise ValueError(f"it is {image.size[0]} x {image.size[1]}, too narrow to be resized to {width} x {height}")
        image = image.resize((width, height), resample)
    if (width, height) == (size, size):
        return image
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def to_pixels(image: Image.Image, out: Pixels) -> None:
    """Copy an image into a batch."""
    array = np.asarray(image)
    out[...] = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def decode_files(paths: Sequence[str], image_size: int, *, channels: int = 3, is_large: bool = False) -> Pixels:
    """Decode images to squares of one size, by threads: 3 channels for colours, 1 for grey.

    The shorter side is resized to `image_size` (bicubic) and the middle cropped; that of large images to
    `image_size / 0.875` (bilinear), as evaluation on ImageNet does.
    """
    pixels = np.empty((len(paths), channels, image_size, image_size), dtype=np.uint8)
    shorter_side = int(image_size / CROP_SHARE) if is_large else image_size
    resample = pillow().BILINEAR if is_large else pillow().BICUBIC
    prepare = partial(resize_and_crop, shorter_side=shorter_side, size=image_size, resample=resample)

    def decode(path: str, out: Pixels) -> None:
        image = read_image(path)
        to_pixels(prepare(image if channels == 3 else image.convert("L")), out)

    in_threads(decode, paths, pixels)
    return pixels


def in_threads(function: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Call a function with the arguments of each row, as `map` does, in threads, and raise its first error."""
    # Threads suffice, since Pillow releases the GIL.
    with ThreadPoolExecutor(min(num_cores(), MAX_THREADS)) as pool:
        for _ in pool.map(function, *arguments):
            pass
