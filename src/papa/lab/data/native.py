"""Data sets that torchvision downloads and reads: CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papa.errors import DataError
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.files import digest_of, resize_arrays
from papa.lab.data.splits import check_labels
from papa.packages import require
from papa.storage.lock import waiting_lock
from papa.training.data import Arrays


@dataclass(frozen=True)
class Native:
    """A data set of torchvision."""

    name: str
    dataset: str
    """A class in `torchvision.datasets`."""
    folder: str
    """The folder of its files, relative to the root."""

    def files(self) -> dict[str, str | None]:
        """Its files and their MD5; MNIST's unpacked files have none."""
        dataset = self._dataset()
        if hasattr(dataset, "resources"):  # MNIST and Fashion-MNIST
            return {name.removesuffix(".gz"): None for name, _ in dataset.resources}
        return {**dict((*dataset.train_list, *dataset.test_list)), dataset.meta["filename"]: dataset.meta["md5"]}

    def is_in(self, root: Path) -> bool:
        return all((root / self.folder / name).is_file() for name in self.files())

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
            inside = [Path(path) for path, _, _ in os.walk(made[-1], topdown=False)] if made else []
            for path in [*inside, *made]:  # the innermost first
                with contextlib.suppress(OSError):
                    path.rmdir()
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(
                f"{self.name} is not in {root} and could not be downloaded ({reason}): {self.expected_files(root)}"
            ) from error

    def expected_files(self, root: Path) -> str:
        return f"expected the files {', '.join(self.files())} in {root / self.folder}"

    def load(self, root: Path, *, train: bool, image_size: int | None) -> tuple[Arrays, tuple[str, ...]]:
        """The images from their cache, and the names of the classes."""
        names = (f"{self.folder}/{name}" for name in self.files())
        digest = digest_of(root, names, set=self.name, train=train, image_size=image_size)
        cache_name = f"{self.name}-{'train' if train else 'test'}-{image_size or 'native'}"
        return cached_images(
            cache_name, folder=root, digest=digest, decode=lambda: self._read(root, train=train, image_size=image_size)
        )

    def _read(self, root: Path, *, train: bool, image_size: int | None) -> Decoded:
        from torchvision.datasets.utils import check_integrity

        home = root / self.folder
        remedy = f"expected the files as they were published: delete {home} to download them again"
        # Before torchvision unpickles CIFAR: a pickle with other contents could run any code.
        damaged = [name for name, md5 in self.files().items() if not check_integrity(home / name, md5)]
        if damaged:
            found = f"{', '.join(damaged)} should have other contents (md5)"
            raise DataError(f"{self.name} in {root} is damaged: {found}, {remedy}")
        try:
            with warnings.catch_warnings():  # NumPy warns about CIFAR's old pickles
                warnings.simplefilter("ignore")
                dataset = self._dataset()(root=str(root), train=train, download=False)
            images, labels = np.asarray(dataset.data), np.asarray(dataset.targets, dtype=np.int64)
        except Exception as error:  # a damaged file makes the reader raise anything
            raise DataError(
                f"{self.name} in {root} cannot be read ({type(error).__name__}: {error}), {remedy}"
            ) from error
        check_labels(torch.from_numpy(labels), len(dataset.classes), f"{self.name} in {root}")
        return Decoded(labels, tuple(dataset.classes), resize_arrays(images, image_size))

    def _dataset(self) -> Any:
        require("torchvision")
        from torchvision import datasets

        return getattr(datasets, self.dataset)


NATIVE = {
    native.name: native
    for native in (
        Native("cifar10", "CIFAR10", "cifar-10-batches-py"),
        Native("cifar100", "CIFAR100", "cifar-100-python"),
        Native("mnist", "MNIST", "MNIST/raw"),
        Native("fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
    )
}
