"""Readings of the paper's logistic regression: which scaling of pixels and which order of images give its numbers?

    python examples/logistic_readings.py FOLDER_WITH_OPTDIGITS

Ten runs of ten members for each reading, all in one array: a minute and a half on one core. Independent members and
PAPA-all see the same images. Training uses NumPy only, so this also checks papa's own numbers.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from papa.lab.data import load_optdigits

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

NUM_RUNS, NUM_MEMBERS, NUM_EPOCHS, LR = 10, 10, 10, 0.1
SCALINGS = ("0 to 16", "0 to 1", "standardised")
ORDERS = ("each member its own", "one for all members, new in each epoch", "one for all members and epochs")


def scaled(train: Floats, test: Floats, scaling: str) -> tuple[Floats, Floats]:
    """Images under one of SCALINGS, with a one appended for the bias."""
    shift, scale = np.zeros(64, np.float32), np.full(64, {"0 to 16": 1.0, "0 to 1": 16.0}.get(scaling, 1.0), np.float32)
    if scaling == "standardised":
        shift, scale = train.mean(axis=0), np.maximum(train.std(axis=0), 0.01)
    train, test = (np.pad((part - shift) / scale, ((0, 0), (0, 1)), constant_values=1.0) for part in (train, test))
    return train, test


def epoch_order(order: str, num_images: int, epoch: int) -> Numbers:
    """The index of the image that each member of each run sees at each step of an epoch."""
    if order == ORDERS[0]:
        seeds = [(run, member, epoch) for run in range(NUM_RUNS) for member in range(NUM_MEMBERS)]
    else:
        seeds = [(run, 0, epoch * (order == ORDERS[1])) for run in range(NUM_RUNS) for _ in range(NUM_MEMBERS)]
    return np.stack([np.random.default_rng(seed).permutation(num_images) for seed in seeds])


def train(images: Floats, labels: Numbers, order: str) -> Floats:
    """Weights of shape (independent or PAPA-all, runs, members, classes, pixels and bias)."""
    begin = np.random.default_rng(0).uniform(-1 / 8, 1 / 8, (NUM_RUNS, NUM_MEMBERS, 10, 65))
    weights = np.stack([begin, begin]).astype(np.float32)
    flat, members = weights.reshape(2, NUM_RUNS * NUM_MEMBERS, 10, 65), np.arange(NUM_RUNS * NUM_MEMBERS)
    for epoch in range(NUM_EPOCHS):
        for indices in epoch_order(order, len(images), epoch).T:
            inputs = images[indices]
            outputs = np.matmul(flat, inputs[None, :, :, None])[..., 0]
            probabilities = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
            probabilities /= probabilities.sum(axis=-1, keepdims=True)
            probabilities[:, members, labels[indices]] -= 1.0
            flat -= (np.float32(LR) * probabilities)[..., None] * inputs[None, :, None, :]
        if epoch < NUM_EPOCHS - 1:  # no merge at the end
            weights[1] = weights[1].mean(axis=1, keepdims=True)
    return weights


def accuracies(weights: Floats, images: Floats, labels: Numbers) -> str:
    """The accuracy of members and of their soup, mean over runs, standard deviation in parentheses."""
    members = (np.einsum("rmcp,np->rmnc", weights, images).argmax(-1) == labels).mean((-1, -2)) * 100.0
    soups = (np.einsum("rcp,np->rnc", weights.mean(1), images).argmax(-1) == labels).mean(-1) * 100.0
    return ", ".join(
        f"{name} {scores.mean():.2f} ({scores.std(ddof=1):.2f})"
        for name, scores in (("mean", members), ("soup", soups))
    )


def main(root: str) -> None:
    """Print one line for each reading."""
    parts = load_optdigits(root)
    (train_images, train_labels), (test_images, test_labels) = (
        (part.inputs.reshape(-1, 64).numpy().astype(np.float32), part.targets.numpy()) for part in parts
    )
    for scaling, order in [(scaling, ORDERS[0]) for scaling in SCALINGS] + [
        (SCALINGS[0], order) for order in ORDERS[1:]
    ]:
        inputs, test_inputs = scaled(train_images, test_images, scaling)
        independent, merged = (
            accuracies(weights, test_inputs, test_labels) for weights in train(inputs, train_labels, order)
        )
        print(f"pixels {scaling}; order {order}: independent {independent}; PAPA-all {merged}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
