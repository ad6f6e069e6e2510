"""Handwritten digits of 8 x 8 pixels: the 1797 images of scikit-learn, and all 5620 images of UCI's optdigits."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from papa.errors import DataError
from papa.lab.data.splits import check_labels
from papa.packages import require
from papa.streams import stream
from papa.training.data import Arrays

NUM_TRAIN = 300
"""The number of scikit-learn's images that are used for training."""
BRIGHTEST = 16
"""The largest value of a pixel, which counts the dots of a 4 x 4 part of the scan."""
MAX_NPZ_BYTES = 1 << 26
"""Many times what the images take as 64-bit numbers."""
TEXT_FILES, NPZ_FILE = ("optdigits.tra", "optdigits.tes"), "optdigits.npz"


def load_digits() -> tuple[Arrays, Arrays]:
    """300 training and 1497 test images as uint8 from 0 to 255; the split is always the same."""
    require("sklearn")
    import sklearn.datasets  # slow to import, and needed only here

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    pixels = torch.from_numpy(np.rint(images * (255.0 / 16.0)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    order = torch.randperm(len(pixels), generator=stream(0, "digits-split"))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return Arrays(pixels[train], targets[train]), Arrays(pixels[test], targets[test])


def load_optdigits(root: str | Path) -> tuple[Arrays, Arrays]:
    """3823 training and 1797 test images by different writers, as uint8 from 0 to 16.

    Args:
        root: a folder with the original files `optdigits.tra` and `optdigits.tes`, which have 64 pixels and the label
            in each line, separated by commas; or with a file `optdigits.npz` of `train_images` (N, 8, 8),
            `train_labels` (N,), `test_images` and `test_labels`.
    """
    root = Path(root)
    if all((root / name).is_file() for name in TEXT_FILES):
        train, test = (_read_text(root / name) for name in TEXT_FILES)
        return train, test
    if (root / NPZ_FILE).is_file():
        return _read_npz(root / NPZ_FILE)
    raise DataError(
        f"optdigits is not in {root}: expected {' and '.join(TEXT_FILES)} of the data set 'Optical Recognition of "
        f"Handwritten Digits' of the UCI Machine Learning Repository, or {NPZ_FILE}. Download them from there, and "
        "set --data.root to their folder (scikit-learn's digits are the test part only)"
    )


def _read_text(path: Path) -> Arrays:
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}), expected lines of 64 pixels and a label") from error
    if table.shape[1] != 65:
        raise DataError(f"{path} has {table.shape[1]} numbers in a line, expected 64 pixels and a label")
    return _arrays(table[:, :64], table[:, 64], str(path))


def _read_npz(path: Path) -> tuple[Arrays, Arrays]:
    names = [f"{part}_{what}" for part in ("train", "test") for what in ("images", "labels")]
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_NPZ_BYTES:
            raise DataError(f"{path} holds {size:,} bytes, expected at most {MAX_NPZ_BYTES:,}")
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}, expected the arrays {', '.join(names)}")
            train_images, train_labels, test_images, test_labels = (file[name].astype(np.int64) for name in names)
    except DataError:
        raise
    except Exception as error:  # a damaged file makes the readers raise anything
        raise DataError(f"{path} cannot be read ({error}), expected the arrays {', '.join(names)}") from error
    return _arrays(train_images, train_labels, str(path)), _arrays(test_images, test_labels, str(path))


def _arrays(images: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], subject: str) -> Arrays:
    if labels.ndim != 1 or images.size != 64 * len(labels):
        raise DataError(
            f"{subject} has images of shape {images.shape} for labels of shape {labels.shape}, expected 8 x 8 pixels "
            "for each label"
        )
    targets = torch.from_numpy(labels)
    check_labels(targets, 10, subject)
    if images.min() < 0 or images.max() > BRIGHTEST:
        raise DataError(
            f"{subject} has pixels from {images.min()} to {images.max()}, expected them from 0 to {BRIGHTEST}"
        )
    return Arrays(torch.from_numpy(images.astype(np.uint8)).reshape(-1, 1, 8, 8), targets)
