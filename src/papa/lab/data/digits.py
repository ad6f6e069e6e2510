"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels that are part of the package."""

from __future__ import annotations

import numpy as np
import torch

from papa.data import Arrays
from papa.streams import stream

NUM_TRAIN = 300


def load_digits() -> tuple[Arrays, Arrays]:
    """300 training and 1497 test images as uint8 from 0 to 255; the split is always the same."""
    import sklearn.datasets  # slow to import, and needed only here

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    pixels = torch.from_numpy(np.rint(images * (255.0 / 16.0)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    order = torch.randperm(len(pixels), generator=stream(0, "digits-split"))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return Arrays(pixels[train], targets[train]), Arrays(pixels[test], targets[test])
