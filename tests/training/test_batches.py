"""Batches are a function of the seed, the member and the step, whoever asked before."""

from __future__ import annotations

import torch

from papa.data import Arrays, Data
from papa.training.batches import Batches


def make_feed() -> Batches:
    source = Arrays(torch.arange(100.0)[:, None], torch.zeros(100, dtype=torch.long))
    return Batches(
        Data(train=source, validation=source),
        members=range(2),
        batch_size=10,
        eval_batch_size=10,
        augment=None,
        prepare=lambda inputs: inputs,
        repair=None,
        seed=1,
        device=torch.device("cpu"),
        channels_last=False,
    )


def test_a_batch_does_not_depend_on_what_was_asked_for_before() -> None:
    twin, batches = {}, make_feed()
    for step in range(25):
        twin[step] = make_feed().training_batch(0, step)[0]
    for step in (0, 1, 2, 2, 12, 5, 24, 9, 10, 11, 0):
        assert torch.equal(batches.training_batch(0, step)[0], twin[step]), step
        assert not torch.equal(batches.training_batch(1, step)[0], twin[step])


def test_an_epoch_shows_every_example_once() -> None:
    batches = make_feed()
    for epoch in range(2):
        seen = torch.cat([batches.training_batch(0, 10 * epoch + position)[0] for position in range(10)])
        assert seen.flatten().sort().values.tolist() == list(range(100))
