"""What networks are fed: every batch is a function of the seed, the member and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from papa.data import Data, Source, stream_batches
from papa.evaluation import Batch
from papa.inputs import Inputs, each
from papa.streams import derive, global_stream, seed_global_, stream

Augment: TypeAlias = Callable[[Inputs, Tensor, torch.Generator], Batch]
"""From raw inputs, targets and a generator to what a network trains on."""

REPAIR_SEED = 666
"""The paper's: REPAIR sees the same data on every call, whatever the run's seed."""


class Batches:
    """Batches for training, for REPAIR and alignment, and for evaluation, on the device and in the memory order wanted.

    Args:
        data: where the examples come from.
        members: whose batches are made here.
        batch_size: of training, and of what REPAIR and alignment look at.
        eval_batch_size: of evaluation.
        augment: one for all members, one for each of the whole population, or None.
        prepare: from raw inputs to a network's, without augmentation.
        num_repair_batches: how many batches REPAIR looks at.
        seed: of all streams but REPAIR's.
        device: where networks are.
        channels_last: the memory order of images.
    """

    def __init__(
        self,
        data: Data,
        *,
        members: range,
        batch_size: int,
        eval_batch_size: int,
        augment: Augment | Sequence[Augment] | None,
        prepare: Callable[[Inputs], Inputs],
        num_repair_batches: int,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        self.data, self.members, self.seed, self.device = data, members, seed, device
        self.batch_size, self.eval_batch_size, self.num_repair_batches = batch_size, eval_batch_size, num_repair_batches
        self.steps_per_epoch = len(data.train) // batch_size
        self.prepare = prepare
        self.augments = [_augment_of(augment, member, prepare) for member in members]
        self.is_augmented = augment is not None
        self._channels_last = channels_last
        self._streams: dict[int, tuple[int, Iterator[Batch]]] = {}
        """For each member, the step whose batch comes next, and where it comes from."""

    def training_batch(self, index: int, step: int) -> Batch:
        """What the member of this index trains on in a step."""
        member = self.members[index]
        # Datasets with random transforms, dropout and drop-path draw from the global generator and offer no other.
        seed_global_(derive(self.seed, "data", member, step))
        generator = stream(self.seed, "augment", member, step)
        return self.augments[index](*self._next(member, step), generator)

    def order(self, member: int, epoch: int) -> Tensor:
        """Which training examples a member sees in an epoch, in their order."""
        generator = stream(self.seed, "order", member, epoch)
        order = torch.randperm(len(self.data.train), generator=generator, device="cpu")
        return order[: self.steps_per_epoch * self.batch_size]

    def _next(self, member: int, step: int) -> Batch:
        epoch, position = divmod(step, self.steps_per_epoch)
        expected, batches = self._streams.get(member, (None, iter(())))
        if position == 0 or step != expected:
            batches = stream_batches(
                self.data.train,
                torch.split(self.order(member, epoch)[position * self.batch_size :], self.batch_size),
                seed=derive(self.seed, "decode", member, epoch),
                start=position,
            )
        inputs, targets = next(batches)
        self._streams[member] = step + 1, batches
        return self.here(inputs), targets.to(self.device, non_blocking=True)

    def here(self, inputs: Inputs) -> Inputs:
        """The inputs on the device that trains."""
        return each(inputs, lambda part: part.to(self.device, non_blocking=True))

    def repair_batches(self, member: int) -> list[Inputs]:
        """The batches REPAIR looks at: the same images on every call and for every member, under its own policy."""
        augment = self.augments[member - self.members.start]
        return [
            self.formatted(augment(*batch, stream(REPAIR_SEED, "repair-augment", position=number))[0])
            for number, batch in enumerate(self._fixed_batches(self.num_repair_batches))
        ]

    def plain_repair_batches(self) -> list[Inputs]:
        """The batches REPAIR looks at, without augmentation."""
        return self.plain_batches(self.num_repair_batches)

    def plain_batches(self, num_batches: int | None) -> list[Inputs]:
        """Training images without augmentation, the same on every call; those that REPAIR looks at come first.

        Args:
            num_batches: how many at most; None for all that are whole.
        """
        return list(self.stream_plain_batches(num_batches))

    def stream_plain_batches(self, num_batches: int | None) -> Iterator[Inputs]:
        """The same, one at a time."""
        for inputs, _ in self._fixed_batches(num_batches):
            yield self.formatted(self.prepare(inputs))

    def _fixed_batches(self, num_batches: int | None) -> Iterator[Batch]:
        order = torch.randperm(len(self.data.train), generator=stream(REPAIR_SEED, "repair"), device="cpu")
        whole = order[: len(order) // self.batch_size * self.batch_size]
        for number, indices in enumerate(torch.split(whole, self.batch_size)[:num_batches]):
            with global_stream(self.seed, "repair", position=number):
                inputs, targets = self.data.train.batch(indices)
            yield self.here(inputs), targets.to(self.device)

    def evaluation_batches(self, source: Source) -> Iterator[Batch]:
        """All examples of a source as networks take them, without augmentation."""
        indices = torch.arange(len(source), device="cpu")
        for number, part in enumerate(torch.split(indices, self.eval_batch_size)):
            with global_stream(self.seed, "evaluate", position=number):  # for datasets with random transforms
                inputs, targets = source.batch(part)
            yield self.formatted(self.prepare(self.here(inputs))), targets.to(self.device)

    def formatted(self, inputs: Inputs) -> Inputs:
        """The inputs in the memory order that networks are in."""
        return each(inputs, _to_channels_last) if self._channels_last else inputs


def _to_channels_last(part: Tensor) -> Tensor:
    return part.to(memory_format=torch.channels_last) if part.dim() == 4 else part


def _augment_of(
    augment: Augment | Sequence[Augment] | None, member: int, prepare: Callable[[Inputs], Inputs]
) -> Augment:
    if augment is None:
        return lambda inputs, targets, generator: (prepare(inputs), targets)
    return augment if callable(augment) else augment[member]
