"""Batches are a function of the seed, the member and the step, whoever asked before."""

from __future__ import annotations

import torch

from papa.training import Settings
from papa.training.batches import Batches
from papa.training.data import Arrays, Data


def make_batches() -> Batches:
    source = Arrays(torch.arange(100.0)[:, None], torch.zeros(100, dtype=torch.long))
    settings = Settings(num_epochs=1, batch_size=10)
    return Batches(Data(train=source, validation=source), settings, range(2), torch.device("cpu"))


def test_a_batch_does_not_depend_on_what_was_asked_for_before() -> None:
    twin, batches = {}, make_batches()
    for step in range(25):
        twin[step] = make_batches().training_batch(0, step)[0]
    for step in (0, 1, 2, 2, 12, 5, 24, 9, 10, 11, 0):
        assert torch.equal(batches.training_batch(0, step)[0], twin[step]), step
        assert not torch.equal(batches.training_batch(1, step)[0], twin[step])


def test_an_epoch_shows_every_example_once() -> None:
    batches = make_batches()
    for epoch in range(2):
        seen = torch.cat([batches.training_batch(0, 10 * epoch + position)[0] for position in range(10)])
        assert seen.flatten().sort().values.tolist() == list(range(100))
