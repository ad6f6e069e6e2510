"""Handwritten digits of 8 x 8 pixels: the 1797 images of scikit-learn, and all 5620 images of UCI's optdigits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
TEXT_FILES = ("optdigits.tra", "optdigits.tes")


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

    `root` is a folder with the original files `optdigits.tra` and `optdigits.tes`, which have 64 pixels and the label
    in each line, separated by commas.
    """
    root = Path(root)
    if not all((root / name).is_file() for name in TEXT_FILES):
        raise DataError(
            f"optdigits is not in {root}: expected {' and '.join(TEXT_FILES)} of the data set 'Optical Recognition of "
            "Handwritten Digits' of the UCI Machine Learning Repository. Download them from there, and set --data.root "
            "to their folder (scikit-learn's digits are the test part only)"
        )
    train, test = (_read_text(root / name) for name in TEXT_FILES)
    return train, test


def _read_text(path: Path) -> Arrays:
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}), expected lines of 64 pixels and a label") from error
    if table.shape[1] != 65:
        raise DataError(f"{path} has {table.shape[1]} numbers in a line, expected 64 pixels and a label")
    pixels, targets = table[:, :64], torch.from_numpy(table[:, 64].copy())
    check_labels(targets, 10, str(path))
    if pixels.min() < 0 or pixels.max() > BRIGHTEST:
        raise DataError(f"{path} has pixels from {pixels.min()} to {pixels.max()}, expected them from 0 to {BRIGHTEST}")
    return Arrays(torch.from_numpy(pixels.astype(np.uint8)).reshape(-1, 1, 8, 8), targets)
