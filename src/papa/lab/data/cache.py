"""A cache of decoded images: safetensors files that every process maps into memory, so that images are decoded once.

Nothing is written next to the data. Caches are in `papa` in the user's cache folder (`$XDG_CACHE_HOME`, or else
`~/.cache`), or in `$PAPA_CACHE`; they may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from papa.errors import DataError, RunError
from papa.lab.data.files import Pixels
from papa.storage import write_atomically
from papa.storage.lock import waiting_lock
from papa.training.data import Arrays


@dataclass(frozen=True)
class Decoded:
    """Images to be cached."""

    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    chunks: Iterator[Pixels]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All pixels and labels."""
        images = np.concatenate(list(self.chunks))
        if len(images) != len(self.labels):
            raise DataError(f"{len(images)} images were decoded for {len(self.labels)} labels, expected one for each")
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(self.labels)}


def cached_images(
    name: str, *, folder: Path, digest: str, decode: Callable[[], Decoded]
) -> tuple[Arrays, tuple[str, ...]]:
    """Images from their cache, which is made first if it is missing, cut short, or of other data; and their classes.

    The digest is of everything the pixels depend on. Where no cache can be written, the images are kept in memory.
    """
    path = cache_folder(folder) / f"{name}.safetensors"
    found = _opened(path, digest)
    if found is None:
        with contextlib.suppress(OSError, RunError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with waiting_lock(path.parent / ".lock"):
                found = _opened(path, digest)  # another process may have made it in the meantime
                if found is None:
                    decoded = decode()
                    about = {"digest": digest, "classes": json.dumps(decoded.classes)}
                    write_atomically(path, save(decoded.tensors(), about))
                    found = _opened(path, digest)
    if found is not None:
        return found
    decoded = decode()
    tensors = decoded.tensors()
    return Arrays(tensors["images"], tensors["labels"]), decoded.classes


def _opened(path: Path, digest: str) -> tuple[Arrays, tuple[str, ...]] | None:
    """The images in a cache of this digest: they stay in the file until they are read."""
    with contextlib.suppress(OSError, SafetensorError, KeyError), safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if about.get("digest") == digest:
            return Arrays(file.get_tensor("images"), file.get_tensor("labels")), tuple(json.loads(about["classes"]))
    return None


def cache_folder(data: Path) -> Path:
    """Where the decoded images of a folder are cached."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    base = os.environ.get("PAPA_CACHE") or os.path.join(user, "papa")
    key = hashlib.blake2b(os.fsencode(data.resolve()), digest_size=8).hexdigest()
    return Path(base, f"{data.resolve().name}-{key}")
