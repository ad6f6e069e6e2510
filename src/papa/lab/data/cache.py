"""A cache of decoded images: safetensors files that every process maps into memory, so that images are decoded once.

Nothing is written next to the data. Caches are in `papa` in the user's cache folder (`$XDG_CACHE_HOME`, or else
`~/.cache`), or in `$PAPA_CACHE`; they may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from papa.errors import RunError
from papa.lab.data.files import Pixels
from papa.storage import write_atomically
from papa.storage.lock import waiting_lock
from papa.training.data import Arrays


class Decoded(NamedTuple):
    """Images to be cached."""

    images: Pixels
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]


def cached_images(
    name: str, *, folder: Path, digest: str, decode: Callable[[], Decoded]
) -> tuple[Arrays, tuple[str, ...]]:
    """Images from their cache, which is made first if it is missing, cut short, or of other data; and their classes.

    The digest is of everything the pixels depend on. Where no cache can be written, the images are kept in memory.
    """
    path = cache_folder(folder) / f"{name}.safetensors"
    decoded = None
    with contextlib.suppress(OSError, RunError):
        if (found := _opened(path, digest)) is not None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(path.parent / ".lock"):
            if (found := _opened(path, digest)) is not None:  # another process made it in the meantime
                return found
            images, labels, classes = decoded = decode()
            tensors = {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}
            write_atomically(path, save(tensors, {"digest": digest, "classes": json.dumps(classes)}))
        if (found := _opened(path, digest)) is not None:
            return found
    images, labels, classes = decoded or decode()
    return Arrays(torch.from_numpy(images), torch.from_numpy(labels)), classes


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
