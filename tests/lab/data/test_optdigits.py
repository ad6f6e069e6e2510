import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from papa.errors import DataError
from papa.lab.data import load_images, load_optdigits

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


def make_part(count: int, seed: int) -> Part:
    random = np.random.default_rng(seed)
    return random.integers(0, 17, (count, 8, 8), dtype=np.uint8), (np.arange(count) % 10).astype(np.uint8)


def write_text(root: Path, train: Part, test: Part) -> None:
    for name, (images, labels) in (("optdigits.tra", train), ("optdigits.tes", test)):
        table = np.concatenate([images.reshape(-1, 64), labels[:, None]], axis=1)
        np.savetxt(root / name, table, fmt="%d", delimiter=",")


def test_pixels_are_as_in_the_files(tmp_path: Path) -> None:
    train, test = make_part(30, 0), make_part(20, 1)
    write_text(tmp_path, train, test)
    for found, (images, labels) in zip(load_optdigits(tmp_path), (train, test), strict=True):
        assert torch.equal(found.inputs, torch.from_numpy(images)[:, None])
        assert found.targets.tolist() == labels.tolist()


def test_as_an_image_set_nothing_is_drawn_and_pixels_stay_counts(tmp_path: Path) -> None:
    write_text(tmp_path, make_part(30, 0), make_part(20, 1))
    images = load_images("optdigits", root=tmp_path)
    assert (images.num_classes, images.channels, images.image_size) == (10, 1, 8)
    assert (images.crop_padding, images.flip) == (0, False)
    assert (images.mean, images.std) == ((0.0,), (1 / 255,))


def test_where_to_get_it_when_it_is_missing(tmp_path: Path) -> None:
    expected = r"expected optdigits.tra and optdigits.tes .*UCI.*set --data\.root to their folder"
    message = rf"optdigits is not in {re.escape(str(tmp_path))}: {expected}"
    with pytest.raises(DataError, match=message):
        load_optdigits(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    images, labels = make_part(20, 0)
    write_text(tmp_path, (images * 3, labels), (images, labels))
    with pytest.raises(DataError, match=r"optdigits\.tra has pixels from 0 to 48, expected them from 0 to 16"):
        load_optdigits(tmp_path)
    write_text(tmp_path, (images, labels + 5), (images, labels))
    with pytest.raises(DataError, match="labels from 5 to 14"):
        load_optdigits(tmp_path)
    write_text(tmp_path, (images, labels), (images, labels))
    (tmp_path / "optdigits.tes").write_text("1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match=r"optdigits\.tes has 3 numbers in a line, expected 64 pixels and a label"):
        load_optdigits(tmp_path)
    (tmp_path / "optdigits.tes").write_text("one,two\n")
    with pytest.raises(DataError, match=r"optdigits\.tes cannot be read"):
        load_optdigits(tmp_path)
