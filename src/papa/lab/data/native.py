"""Data sets that torchvision downloads and reads: CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papa.data import Arrays
from papa.errors import ConfigError, DataError
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.decode import resize_arrays
from papa.lab.data.files import digest_of
from papa.lab.data.splits import check_labels
from papa.lock import waiting_lock


@dataclass(frozen=True)
class Native:
    """A data set of torchvision."""

    name: str
    dataset: str
    """A class in `torchvision.datasets`."""
    folder: str
    """The folder of its files, relative to the root."""

    def file_names(self) -> tuple[str, ...]:
        """Its files, relative to the root."""
        dataset = self._dataset()
        if hasattr(dataset, "resources"):  # MNIST and Fashion-MNIST
            names = [name.removesuffix(".gz") for name, _ in dataset.resources]
        else:
            names = [name for name, _ in (*dataset.train_list, *dataset.test_list)] + [dataset.meta["filename"]]
        return tuple(f"{self.folder}/{name}" for name in names)

    def is_in(self, root: Path) -> bool:
        """Whether all files exist."""
        return not self._missing(root)

    def fetch(self, root: Path) -> None:
        """Download missing files; a failure leaves no empty directories."""
        home = root / self.folder
        made = [path for path in (home, *home.parents) if not path.exists()]
        try:
            root.mkdir(parents=True, exist_ok=True)
            with waiting_lock(root / ".lock"):  # of several processes one downloads, and the others wait for it
                if not self.is_in(root):
                    self._dataset()(root=str(root), train=True, download=True)
        except Exception as error:  # network, disk and archive errors of many kinds
            _remove_empty(made)
            raise DataError(
                f"{self.name} is not in {root} and could not be downloaded ({type(error).__name__}: "
                f"{_one_line(error)}): {self.expected_files(root)}"
            ) from error

    def expected_files(self, root: Path) -> str:
        """Says which files are expected, for messages."""
        names = ", ".join(os.path.basename(name) for name in self.file_names())
        return f"expected the files {names} in {root / self.folder}"

    def load(self, root: Path, *, train: bool, image_size: int | None) -> tuple[Arrays, tuple[str, ...]]:
        """The images from their cache, and the names of the classes."""
        digest = digest_of(root, self.file_names(), set=self.name, train=train, image_size=image_size)
        cache_name = f"{self.name}-{'train' if train else 'test'}-{image_size or 'native'}"
        return cached_images(
            cache_name, folder=root, digest=digest, decode=lambda: self._read(root, train=train, image_size=image_size)
        )

    def _read(self, root: Path, *, train: bool, image_size: int | None) -> Decoded:
        self._check_intact(root)
        try:
            with warnings.catch_warnings():  # NumPy warns about CIFAR's old pickles
                warnings.simplefilter("ignore")
                dataset = self._dataset()(root=str(root), train=train, download=False)
            images, labels = np.asarray(dataset.data), np.asarray(dataset.targets, dtype=np.int64)
            classes = tuple(dataset.classes)
        except Exception as error:  # a damaged file makes the reader raise anything
            raise DataError(
                f"{self.name} in {root} cannot be read ({type(error).__name__}: {error}), {self._remedy(root)}"
            ) from error
        check_labels(torch.from_numpy(labels), len(classes), f"{self.name} in {root}")
        return Decoded(labels, classes, resize_arrays(images, image_size))

    def _check_intact(self, root: Path) -> None:
        """Raise an error that names the damaged files; MNIST's unpacked files have no checksum."""
        dataset = self._dataset()
        if hasattr(dataset, "resources"):
            return
        sums = {**dict((*dataset.train_list, *dataset.test_list)), dataset.meta["filename"]: dataset.meta["md5"]}
        from torchvision.datasets.utils import check_integrity

        damaged = [name for name, md5 in sums.items() if not check_integrity(root / self.folder / name, md5)]
        if damaged:
            raise DataError(
                f"{self.name} in {root} is damaged: {', '.join(damaged)} should have other contents (md5), "
                f"{self._remedy(root)}"
            )

    def _remedy(self, root: Path) -> str:
        return f"expected the files as they were published: delete {root / self.folder} to download them again"

    def _missing(self, root: Path) -> list[str]:
        return [name for name in self.file_names() if not (root / name).is_file()]

    def _dataset(self) -> Any:
        try:
            from torchvision import datasets
        except ImportError as error:
            raise ConfigError(
                f"{self.name} needs torchvision, which is not installed: pip install 'papa-torch[lab]'"
            ) from error
        return getattr(datasets, self.dataset)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


NATIVE = {
    native.name: native
    for native in (
        Native("cifar10", "CIFAR10", "cifar-10-batches-py"),
        Native("cifar100", "CIFAR100", "cifar-100-python"),
        Native("mnist", "MNIST", "MNIST/raw"),
        Native("fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
    )
}


def _remove_empty(made: Sequence[Path]) -> None:
    """Remove directories that were made, and those in them, if they are empty; the innermost first."""
    inside = [Path(path) for path, _, _ in os.walk(made[-1], topdown=False)] if made else []
    for path in dict.fromkeys([*inside, *made]):
        with contextlib.suppress(OSError):
            path.rmdir()
