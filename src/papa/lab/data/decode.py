"""Decoding image files: reading, resizing, cropping."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from papa.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL import Image

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""Images as bytes, of shape (N, channels, height, width)."""

CHUNK = 512
MAX_PIXELS = 1 << 26
"""More than any image has after its shorter side was resized: a narrow one of few bytes could fill the memory."""
MAX_THREADS = 16
_MIN_THREADED_PIXELS = 96 * 96  # for smaller images most of the work holds the GIL


def pillow() -> Any:
    """The module `PIL.Image`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("images need Pillow, which is not installed: pip install 'papa-torch[lab]'") from error
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


def decode_files(paths: Sequence[str], image_size: int | None) -> Iterator[Pixels]:
    """Decode images to squares of one size, in chunks, in order.

    Args:
        paths: the image files.
        image_size: resize the shorter side to this (bicubic) and crop the middle; None for images that are all squares
            of one size already.
    """
    width, height = read_size(paths[0])
    if image_size is None and width != height:
        raise DataError(
            f"the image {paths[0]} is {width} x {height}, expected a square: set image_size to resize all images"
        )
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    native = None if image_size is not None else (paths[0], width)

    def decode(chunk: Sequence[str]) -> Pixels:
        return _decode_chunk(chunk, image_size, native)

    if len(chunks) == 1 or width * height < _MIN_THREADED_PIXELS:
        yield from map(decode, chunks)
        return
    # Threads suffice, since Pillow releases the GIL.
    pool = ThreadPoolExecutor(min(num_cores(), MAX_THREADS))
    try:
        yield from pool.map(decode, chunks)
    finally:
        pool.shutdown(cancel_futures=True)


def resize_arrays(images: npt.NDArray[np.uint8], image_size: int | None) -> Iterator[Pixels]:
    """Resize images in memory, (N, height, width) or (N, height, width, channels), as `decode_files` does."""
    planar = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    for start in range(0, len(images), CHUNK):
        if image_size is None or image_size == images.shape[1] == images.shape[2]:
            yield np.ascontiguousarray(planar[start : start + CHUNK])
            continue
        module = pillow()
        chunk = images[start : start + CHUNK]
        resized = np.empty((len(chunk), planar.shape[1], image_size, image_size), dtype=np.uint8)
        for array, out in zip(chunk, resized, strict=True):
            image = module.fromarray(array)
            to_pixels(resize_and_crop(image, shorter_side=image_size, size=image_size, resample=module.BICUBIC), out)
        yield resized


def in_threads(function: Callable[[int], object], count: int) -> None:
    """Call a function with 0 to `count` - 1 in threads, and raise its first error."""
    if count == 1:
        function(0)
        return
    with ThreadPoolExecutor(min(count, num_cores(), MAX_THREADS)) as pool:
        for _ in pool.map(function, range(count)):
            pass


def _decode_chunk(paths: Sequence[str], image_size: int | None, native: tuple[str, int] | None) -> Pixels:
    bicubic = pillow().BICUBIC
    side = image_size if native is None else native[1]
    assert side is not None
    pixels = np.empty((len(paths), 3, side, side), dtype=np.uint8)
    for path, out in zip(paths, pixels, strict=True):
        image = read_image(path)
        if native is not None and image.size != (side, side):
            width, height = image.size
            raise DataError(
                f"the images differ in size: {native[0]} is {side} x {side}, {path} is {width} x {height}. "
                "Expected one size: set image_size to resize all images"
            )
        to_pixels(resize_and_crop(image, shorter_side=side, size=side, resample=bicubic), out)
    return pixels
