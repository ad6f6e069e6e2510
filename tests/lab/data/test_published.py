"""CIFAR and MNIST: torchvision's files, class folders, and what may be wrong with them."""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from papa.errors import ConfigError, DataError
from papa.lab.data import load_images
from papa.training.data import Arrays

MakeImages = Callable[..., list[Path]]


def write_pickle(path: Path, content: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def batch_of(number: int, labels: list[int]) -> dict[str, Any]:
    data = np.random.default_rng(number).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return {"data": data, "labels": labels}


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch, labels: list[int] | None = None) -> None:
    """Files like CIFAR-10's, and torchvision made to expect their checksums."""
    labels = list(range(10)) if labels is None else labels
    folder = root / "cifar-10-batches-py"
    names = [name for name, _ in datasets.CIFAR10.train_list]
    train = [[name, write_pickle(folder / name, batch_of(n, labels))] for n, name in enumerate(names)]
    test = [["test_batch", write_pickle(folder / "test_batch", batch_of(9, labels))]]
    classes = [f"class {n}" for n in range(10)]
    meta = {"filename": "batches.meta", "key": "label_names"}
    meta["md5"] = write_pickle(folder / "batches.meta", {"label_names": classes})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", train)
    monkeypatch.setattr(datasets.CIFAR10, "test_list", test)
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, count, 28, 28) + pixels.tobytes())
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels.tobytes())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise URLError("no network")

    for module in (datasets.cifar, datasets.mnist):
        monkeypatch.setattr(module, "download_and_extract_archive", refuse)


def test_cifar10_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    images = load_images("cifar10", root=tmp_path)
    assert isinstance(images.train, Arrays)
    assert (len(images.train), len(images.test), images.num_classes) == (50, 10, 10)
    assert (images.channels, images.image_size, images.crop_padding, images.flip) == (3, 32, 4, True)
    assert images.mean == (0.4914, 0.4822, 0.4465)
    assert images.classes[3] == "class 3"
    inputs, targets = images.train.batch(torch.tensor([13]))
    assert torch.equal(inputs.view(-1), torch.from_numpy(batch_of(1, list(range(10)))["data"][3]))
    assert targets.tolist() == [3]


def test_cifar10_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    first = load_images("cifar10", root=tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", fail)
    second = load_images("cifar10", root=tmp_path)
    assert second.classes == first.classes
    assert torch.equal(second.test.batch(torch.arange(10))[0], first.test.batch(torch.arange(10))[0])


@pytest.mark.usefixtures("offline")
def test_a_damaged_cifar10_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    load_images("cifar10", root=tmp_path)
    with open(tmp_path / "cifar-10-batches-py" / "data_batch_3", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"cifar10 can neither be read from .* \(.*delete it to download"):
        load_images("cifar10", root=tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist"])
def test_files_that_are_not_there_or_only_look_like_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        write_cifar10(tmp_path, patched)
    with pytest.raises(DataError, match=rf"{name} can neither be read from .* nor downloaded \(.*expected its files"):
        load_images(name, root=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="nor downloaded"):
        load_images(name, root=tmp_path / "file" / "data")


def test_labels_out_of_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch, labels=[0, 10])
    with pytest.raises(DataError, match=r"cifar10 in .* has labels from 0 to 10, expected them from 0 to 9"):
        load_images("cifar10", root=tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", write_pickle(path, {"data": []})]])
    with pytest.raises(DataError, match=r"cifar10 can neither be read from .* \(KeyError: .*expected its files as"):
        load_images("cifar10", root=tmp_path)


@pytest.mark.parametrize("folder", ["cifar100", "cifar-100"])
def test_cifar100_as_class_folders(tmp_path: Path, make_images: MakeImages, folder: str) -> None:
    for part, count in (("train", 2), ("test", 1)):
        for number in range(100):
            make_images(tmp_path / folder / part / f"class{number:02d}", count, (32, 32))
    images = load_images("cifar100", root=tmp_path, max_test=50)
    assert isinstance(images.train, Arrays)
    assert (len(images.train), len(images.test), images.num_classes) == (200, 50, 100)
    assert images.mean == (0.5071, 0.4865, 0.4409)
    assert (images.crop_padding, images.flip) == (4, True)


def test_part_of_cifar100(tmp_path: Path, make_images: MakeImages) -> None:
    for part in ("train", "test"):
        make_images(tmp_path / "cifar100" / part / "apple", 1, (32, 32))
    with pytest.raises(DataError, match=r"cifar100 in .* has 1 class folders, expected 100: part of it is missing"):
        load_images("cifar100", root=tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_files(tmp_path: Path, name: str, folder: str) -> None:
    write_mnist(tmp_path / folder / "raw")
    images = load_images(name, root=tmp_path)
    assert (len(images.train), len(images.test), images.num_classes) == (20, 10, 10)
    assert (images.channels, images.image_size, images.flip) == (1, 28, name == "fashion-mnist")
    assert images.train.batch(torch.tensor([12]))[1].tolist() == [2]
    with open(tmp_path / folder / "raw" / "train-images-idx3-ubyte", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=rf"{name} can neither be read"):
        load_images(name, root=tmp_path)


def test_downloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        write_cifar10(tmp_path / "elsewhere", elsewhere)
    root = tmp_path / "data"
    monkeypatch.setattr(
        datasets.cifar, "download_and_extract_archive", lambda *_, **__: write_cifar10(root, monkeypatch)
    )
    assert len(load_images("cifar10", root=root).train) == 50


def test_without_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=r"the package torchvision is not installed: pip install 'papa-torch\[lab\]'"):
        load_images("cifar10", root=tmp_path)
