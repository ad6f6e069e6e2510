"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels that come with the package."""

from __future__ import annotations

import numpy as np
import torch

from papa.data import Arrays
from papa.lab.packages import missing_package
from papa.streams import stream

NUM_TRAIN = 300


def load_digits() -> tuple[Arrays, Arrays]:
    """Train (300) and test (1497) images as uint8 of 0 to 255, and their labels.

    The split is a fixed shuffle, so that every seed and method is tested on the same images.
    """
    try:
        import sklearn.datasets  # slow to import, and nothing else here needs it
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    pixels = torch.from_numpy(np.rint(images * (255.0 / 16.0)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    order = torch.randperm(len(pixels), generator=stream(0, "digits-split"))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return Arrays(pixels[train], targets[train]), Arrays(pixels[test], targets[test])
