"""A cache of decoded images: numpy files that every process maps into memory, so that images are decoded once.

A cache is two files: `NAME.npy` with the pixels, and `NAME.json` with labels, classes, a checksum of the pixels and a
digest of the data they were made of. The JSON file is written last; a cache that does not match it is made again.

Nothing is written next to the data. Caches are in `papa` in the user's cache folder (`$XDG_CACHE_HOME`, or else
`~/.cache`), or in `$PAPA_CACHE`; they may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from papa.errors import DataError
from papa.lab.data.files import Pixels
from papa.storage import file_errors, json_text, read_json, validated, write_file
from papa.storage.lock import waiting_lock
from papa.training.data import Arrays


@dataclass(frozen=True)
class Decoded:
    """Images to be cached."""

    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    chunks: Iterator[Pixels]


class Description(TypedDict):
    """What the JSON file of a cache holds."""

    digest: str
    checksum: int
    labels: list[int]
    classes: list[str]


class MappedImages(Arrays):
    """Cached images, mapped into memory: a batch copies its images, and no process holds all of them."""

    def __init__(self, path: str | Path, digest: str) -> None:
        self.path, self.digest = Path(path), digest
        with file_errors(self.path, error=DataError, kind="a valid image cache"):
            description = validated(read_json(self.path.with_suffix(".json"), error=DataError), Description)
            if description["digest"] != digest:
                raise ValueError("it was made of other files")
            # Copy-on-write, since torch warns about read-only arrays; nothing is written, so no page is copied.
            self.mapped: np.memmap[Any, np.dtype[np.uint8]] = np.load(self.path, mmap_mode="c", allow_pickle=False)
            labels = np.array(description["labels"], dtype=np.int64)
            if self.mapped.dtype != np.uint8 or len(self.mapped) != len(labels):
                raise ValueError("it does not have one image of bytes per label")
            if self.path.stat().st_size != self.mapped.offset + self.mapped.nbytes:
                raise ValueError("it has another size than its header says")
            if zlib.crc32(np.ascontiguousarray(self.mapped).data) != description["checksum"]:
                raise ValueError("it is damaged")
        self.classes = tuple(description["classes"])
        super().__init__(torch.from_numpy(self.mapped), torch.from_numpy(labels))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the file itself; the pixels are not sent.
        return MappedImages, (str(self.path), self.digest)


def cached_images(
    name: str, *, folder: Path, digest: str, decode: Callable[[], Decoded]
) -> tuple[Arrays, tuple[str, ...]]:
    """Images from their cache, which is made first if it is missing, damaged, or of other data; and their classes.

    The digest is of everything the pixels depend on. Where no cache can be written, the images are kept in memory.
    """
    path = cache_folder(folder) / f"{name}.npy"
    found = _open_valid(path, digest)
    if found is None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with waiting_lock(path.parent / ".lock"):
                found = _open_valid(path, digest)  # another process may have made it in the meantime
                if found is None:
                    write_cache(path, digest, decode())
                    found = _open_valid(path, digest)
    if found is not None:
        return found, found.classes
    decoded = decode()
    return Arrays(np.concatenate(list(decoded.chunks)), decoded.labels), decoded.classes


def write_cache(path: Path, digest: str, decoded: Decoded) -> None:
    """Write a cache, both files under other names first: the pixels, and then their description."""
    # Random names, since other processes may do the same where the file system has no locks.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        description: Description = {
            "digest": digest,
            "checksum": _write_pixels(partial, decoded),
            "labels": decoded.labels.tolist(),
            "classes": list(decoded.classes),
        }
        os.replace(partial, path)
        write_file(partial, [json_text(description).encode()])
        os.replace(partial, path.with_suffix(".json"))
    finally:
        partial.unlink(missing_ok=True)


def _write_pixels(path: Path, decoded: Decoded) -> int:
    """Write a numpy file chunk by chunk; returns its checksum.

    Not through a memory map, where a full disk would end the process instead of raising an error.
    """
    count, checksum, expected = 0, 0, len(decoded.labels)
    with open(path, "xb") as file:
        for chunk in map(np.ascontiguousarray, decoded.chunks):
            if not count:
                header = {"descr": "|u1", "fortran_order": False, "shape": (expected, *chunk.shape[1:])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(chunk.data)
            count, checksum = count + len(chunk), zlib.crc32(chunk.data, checksum)
    if count != expected:
        raise DataError(f"{count} images were decoded for {expected} labels, expected one label for each")
    return checksum


def _open_valid(path: Path, digest: str) -> MappedImages | None:
    with contextlib.suppress(DataError):
        return MappedImages(path, digest)
    return None


def cache_folder(data: Path) -> Path:
    """Where the decoded images of a folder are cached."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    base = os.environ.get("PAPA_CACHE") or os.path.join(user, "papa")
    key = hashlib.blake2b(os.fsencode(data.resolve()), digest_size=8).hexdigest()
    return Path(base, f"{data.resolve().name}-{key}")
