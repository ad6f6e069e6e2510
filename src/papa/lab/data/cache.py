"""Decoded images in a file that every process maps: decoded once, in memory once, whoever reads them.

The file: a preamble that says where the header is, the raw pixels, the labels, and the header, a JSON object with
shape, classes and a digest of what the images were made of. It is written aside and renamed, so it is there whole or
not at all; a sum over its contents tells a damaged file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from papa.data import Arrays
from papa.errors import DataError
from papa.lab.data.decode import Pixels

if sys.platform != "win32":
    import fcntl

FOLDER = ".papa-cache"
"""The folder beside the data that holds the cache files; it may be deleted at any time."""

_MAGIC = b"PAPAIMG1"
_PREAMBLE = struct.Struct("<8sQQQ")  # magic, checksum, where the labels start, where the header starts
_PIXELS_START = 4096  # a page, so that pixels are aligned


@dataclass(frozen=True)
class Decoded:
    """Images on their way into a cache."""

    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    chunks: Iterator[Pixels]


class MappedImages(Arrays):
    """Images in a cache file that is mapped, not read: one gather per batch, no pixel in this process's own memory.

    Args:
        path: a file that `write_cache` wrote.
        digest: what it must have been made of.
    """

    def __init__(self, path: str | Path, digest: str) -> None:
        self.path, self.digest = Path(path), digest
        try:
            # Copy-on-write, since torch wants tensors it may write to; nobody does, so no page is ever copied.
            self.mapped = np.memmap(self.path, dtype=np.uint8, mode="c")
            header, labels_start, header_start = _read_header(self.mapped)
            if header["digest"] != digest:
                raise ValueError("it was made of other files")
            shape = tuple(header["shape"])
            labels = np.frombuffer(self.mapped[labels_start:header_start].tobytes(), dtype="<i8").copy()
            pixels = self.mapped[_PIXELS_START:labels_start].reshape(shape)
            self.classes: tuple[str, ...] = tuple(header["classes"])
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise DataError(
                f"the image cache {path} cannot be used ({error}), expected a whole cache file of the images "
                "it is for: load the images again"
            ) from error
        super().__init__(torch.from_numpy(pixels), torch.from_numpy(labels))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the file for itself; the pixels do not travel.
        return MappedImages, (str(self.path), self.digest)


def cached_images(
    name: str, *, folder: Path, digest: str, decode: Callable[[], Decoded]
) -> tuple[Arrays, tuple[str, ...]]:
    """Images from their cache file, which is made first when it is missing, damaged, or of other files.

    The file is put beside the data; where that cannot be written, into the user's cache folder; and where that cannot
    be written either, the images are kept in memory.

    Args:
        name: of the cache file, such as `cifar100-train-32`.
        folder: where the data is.
        digest: of everything the pixels depend on.
        decode: makes the images.

    Returns:
        The images, and the names of their classes.
    """
    places = _places(folder, f"{name}.images")
    for place in places:
        found = _open_if_good(place, digest)
        if found is not None:
            return found, found.classes
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            with locked(place.parent):
                found = _open_if_good(place, digest)  # another process may have made it while this one waited
                if found is None:
                    write_cache(place, digest, decode())
                    found = _open_if_good(place, digest)
            if found is not None:
                return found, found.classes
    decoded = decode()
    return Arrays(np.concatenate(list(decoded.chunks)), decoded.labels), decoded.classes


def write_cache(path: Path, digest: str, decoded: Decoded) -> None:
    """Write a cache file aside, then rename it into its place."""
    # Not a temporary file of the standard library, which nobody but its owner could read.
    aside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "xb+") as file:
            _write(file, digest, decoded)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes that do the same, so that they do not all do the same work.

    Where the system has no such lock, nothing is held.
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, digest: str, decoded: Decoded) -> None:
    file.write(bytes(_PIXELS_START))
    count, image_shape = 0, ()
    for chunk in decoded.chunks:
        file.write(np.ascontiguousarray(chunk).data)
        count, image_shape = count + len(chunk), chunk.shape[1:]
    if count != len(decoded.labels):
        raise DataError(f"{count} images were decoded for {len(decoded.labels)} labels, expected one label for each")
    labels_start = file.tell()
    file.write(decoded.labels.astype("<i8").tobytes())
    header_start = file.tell()
    file.write(json.dumps({"shape": (count, *image_shape), "classes": decoded.classes, "digest": digest}).encode())
    file.flush()
    checksum = _checksum(np.memmap(file, dtype=np.uint8, mode="r"))
    file.seek(0)
    file.write(_PREAMBLE.pack(_MAGIC, checksum, labels_start, header_start))
    # No fsync: should the machine go down, the sum tells that the file is not whole, and it is made again.


def _read_header(content: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], int, int]:
    magic, checksum, labels_start, header_start = _PREAMBLE.unpack(content[: _PREAMBLE.size].tobytes())
    if magic != _MAGIC:
        raise ValueError("it is not a cache file")
    if checksum != _checksum(content):
        raise ValueError("it is damaged")
    return json.loads(content[header_start:].tobytes()), labels_start, header_start


def _checksum(content: npt.NDArray[np.uint8]) -> int:
    """A sum of 8-byte words: as fast as memory, and any one change shows."""
    body = content[_PIXELS_START:]
    num_whole = len(body) // 8 * 8
    words = int(body[:num_whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + zlib.crc32(body[num_whole:].tobytes()) + len(body)) % 2**64


def _open_if_good(path: Path, digest: str) -> MappedImages | None:
    with contextlib.suppress(DataError):
        return MappedImages(path, digest)
    return None


def _places(folder: Path, file_name: str) -> tuple[Path, Path]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    key = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    return folder / FOLDER / file_name, Path(base, "papa", f"{folder.resolve().name}-{key}", file_name)
