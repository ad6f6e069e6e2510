"""Batches are a function of the seed, the member and the step, whoever asked before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from papa.training import Settings, Transforms
from papa.training.batches import Batches
from papa.training.data import Arrays, Data


def make_batches(device: str = "cpu", transforms: Transforms = Transforms()) -> Batches:  # noqa: B008
    source = Arrays(torch.arange(100.0)[:, None], torch.zeros(100, dtype=torch.long))
    settings = Settings(num_epochs=1, batch_size=10, transforms=transforms)
    return Batches(Data(train=source, validation=source), settings, range(2), torch.device(device))


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


@pytest.mark.parametrize("is_augmented", [False, True])
def test_batches_are_augmented_where_the_data_is_and_prepared_on_the_training_device(is_augmented: bool) -> None:
    found: list[str] = []

    def prepare(inputs: Tensor) -> Tensor:
        found.append(inputs.device.type)
        return inputs + 1

    def augment(inputs: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        found.append(inputs.device.type)
        return inputs + torch.randn(inputs.shape, generator=generator), targets

    transforms = Transforms(prepare=prepare, augment=augment if is_augmented else None)
    batches = make_batches("meta", transforms)
    for batch in (batches.training_batch(0, 0), next(batches.evaluation(batches.data.validation))):
        assert [part.device.type for part in batch] == ["meta", "meta"]
    assert [part.device.type for part in batches.stream_augmented([0], 1)] == ["meta"]
    assert found == (["cpu", "meta", "cpu"] if is_augmented else ["meta", "meta", "meta"])
