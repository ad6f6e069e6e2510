"""Data sets that torchvision downloads, checks and reads: CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch

from papa.errors import DataError
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.files import digest_of
from papa.lab.data.splits import check_labels
from papa.packages import require
from papa.storage.lock import waiting_lock
from papa.training.data import Arrays

PUBLISHED = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw"),
}
"""The class in `torchvision.datasets`, and the folder of its files."""


def load_published(name: str, root: Path) -> tuple[Arrays, Arrays, tuple[str, ...]]:
    """Training and test images from their cache, and the names of the classes; missing files are downloaded."""
    require("torchvision")
    from torchvision import datasets

    kind, folder = getattr(datasets, PUBLISHED[name][0]), root / PUBLISHED[name][1]

    def part(train: bool) -> tuple[Arrays, tuple[str, ...]]:
        files = sorted(str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file())
        digest = digest_of(root, files, set=name, train=train)
        cache_name = f"{name}-{'train' if train else 'test'}"
        return cached_images(cache_name, folder=root, digest=digest, decode=lambda: read(train))

    def read(train: bool) -> Decoded:
        with warnings.catch_warnings():  # NumPy warns about CIFAR's old pickles
            warnings.simplefilter("ignore")
            # It reads pickles only after it has checked that they are the published ones.
            found = kind(root=str(root), train=train, download=True)
        labels = np.asarray(found.targets, dtype=np.int64)
        check_labels(torch.from_numpy(labels), len(found.classes), f"{name} in {root}")
        images = np.asarray(found.data)
        planar = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        return Decoded(np.ascontiguousarray(planar), labels, tuple(found.classes))

    try:
        if not folder.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with waiting_lock(root / ".lock"):  # of several processes one downloads, and the others wait for it
                read(train=False)
        (train, classes), (test, _) = part(True), part(False)
    except DataError:
        raise
    except Exception as error:  # network, disk and archive errors of many kinds
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"{name} can neither be read from {folder} nor downloaded ({reason}), expected its files as they were "
            f"published: set --data.root to where {PUBLISHED[name][1]} is, or delete it to download them again"
        ) from error
    return train, test, classes
