"""The batches of a training: each is a function of the seed, the member and its number, counted across epochs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from papa.errors import ConfigError, DataError
from papa.evaluation.inputs import Inputs, each, tensors_in
from papa.evaluation.scores import Batch
from papa.streams import derive, seed_global_
from papa.training.data import FIXED_SEED, Arrays, ByIndex, Data, Source, Subset, reader_of
from papa.training.options import Settings

EXAMPLES_AHEAD = 4096
"""The number of examples that stacked members gather and prepare at once."""


class Batches:
    """Batches for training, REPAIR, alignment and evaluation, on the right device and in the right format."""

    def __init__(self, data: Data, settings: Settings, members: range, device: torch.device) -> None:
        self.data, self.members, self.device = data, members, device
        self.seed, self.batch_size = settings.seed, settings.batch_size
        self.eval_batch_size = settings.task.eval_batch_size
        repair = settings.averaging.repair
        self.num_repair_batches = 0 if repair is None else repair.num_batches
        self.reader = reader_of(data.train, settings.batch_size)
        """What gives members their batches."""
        self.num_per_epoch = len(self.reader) // settings.accumulate * settings.accumulate
        """Batches of an epoch, for each member."""
        self.prepare = settings.transforms.prepare
        self._augment = settings.transforms.augment
        self._channels_last = settings.numerics.channels_last
        self._streams: dict[int, tuple[int, Iterator[Batch]]] = {}
        """For each member, the number of the next batch, and the iterator it comes from."""

    def _augmented(self, batch: Batch, member: int, seed: int) -> Batch:
        """A batch as the networks take it: augmented where the data is, or prepared on the training device."""
        inputs, targets = batch
        if self._augment is None:
            return self.prepare(self.to_device(inputs)), self.to_device(targets)
        augment = self._augment if callable(self._augment) else self._augment[member]
        generator = torch.Generator(tensors_in(inputs)[0].device).manual_seed(seed)
        inputs, targets = augment(inputs, targets, generator)
        return self.to_device(inputs), self.to_device(targets)

    def training_batch(self, index: int, number: int) -> Batch:
        """A batch of the local member of this index; without accumulation there is one for each step."""
        member = self.members[index]
        # Datasets with random transforms, dropout and drop-path draw from the global generator only.
        seed_global_(derive(self.seed, "data", member, number))
        return self._augmented(self._next(member, number), member, derive(self.seed, "augment", member, number))

    def stacked(self, step: int) -> Iterator[Batch]:
        """The training batches of all local members from a step on, each stacked to `(members, batch_size, ...)`.

        If nothing about them is random, many steps are gathered and prepared at a time.
        """
        plain = ByIndex(self.data.train, self.batch_size)
        is_plain = self._augment is None and _is_in_memory(self.data.train)
        while not is_plain:
            drawn = [self.training_batch(index, step) for index in range(len(self.members))]
            forms = [
                f"{tuple(_one(inputs).shape)} and targets {tuple(targets.shape)} of {targets.dtype}"
                for inputs, targets in drawn
            ]
            for member, form in zip(self.members, forms, strict=True):
                if form != forms[0]:
                    raise DataError(
                        f"member {member} trains on inputs of shape {form}, member {self.members[0]} on {forms[0]}: "
                        "stacked members need batches of one shape, leave out engine=Stacked"
                    )
            all_inputs, all_targets = zip(*drawn, strict=True)
            yield torch.stack(all_inputs), torch.stack(all_targets)
            step += 1
        epoch, position = divmod(step, self.num_per_epoch)
        while True:
            orders = torch.stack([plain.order(self.seed, member, epoch) for member in self.members])
            orders = orders[:, : self.num_per_epoch * self.batch_size]
            steps = orders.view(len(orders), -1, self.batch_size).transpose(0, 1)[position:]
            for part in steps.split(max(1, EXAMPLES_AHEAD // steps[0].numel())):  # type: ignore[no-untyped-call]
                inputs, targets = self.data.train.batch(part.flatten())
                prepared = _one(self.prepare(self.to_device(inputs))), self.to_device(targets)
                yield from zip(*(one.view(*part.shape, *one.shape[1:]) for one in prepared), strict=True)
            epoch, position = epoch + 1, 0

    def _next(self, member: int, number: int) -> Batch:
        epoch, position = divmod(number, self.num_per_epoch)
        expected, batches = self._streams.get(member, (None, iter(())))
        if position == 0 or number != expected:
            batches = self.reader.training(self.seed, member, epoch, position)
        found = next(batches, None)
        if found is None:
            raise DataError(
                f"the data of member {member} ended after {position} batches of an epoch, expected "
                f"{self.num_per_epoch}: pass steps_per_epoch"
            )
        self._streams[member] = number + 1, batches
        return found

    def to_device(self, inputs: Inputs) -> Inputs:
        """Inputs or targets on the training device."""
        return each(inputs, lambda part: part.to(self.device, non_blocking=True))

    def repair_batches(self, member: int) -> list[Inputs]:
        """The inputs REPAIR uses: the same images on every call and for every member, under its own augmentation."""
        return list(self.stream_augmented([member], self.num_repair_batches))

    def stream_augmented(self, members: Sequence[int], num_batches: int | None) -> Iterator[Inputs]:
        """The images of `plain`, one batch at a time, under the augmentations of these members in turn.

        Members may be those of other processes.
        """
        for number, batch in enumerate(self._fixed(num_batches)):
            seed = derive(FIXED_SEED, "repair-augment", position=number)
            yield self.formatted(self._augmented(batch, members[number % len(members)], seed)[0])

    def plain_repair(self) -> list[Inputs]:
        """The inputs REPAIR uses, without augmentation."""
        return self.plain(self.num_repair_batches)

    def plain(self, num_batches: int | None) -> list[Inputs]:
        """Training inputs without augmentation, the same on every call; those that REPAIR uses come first.

        At most `num_batches`; None for all complete batches.
        """
        return [self.formatted(self.prepare(self.to_device(inputs))) for inputs, _ in self._fixed(num_batches)]

    def _fixed(self, num_batches: int | None) -> Iterator[Batch]:
        return itertools.islice(self.reader.fixed(self.seed), num_batches)

    def evaluation(self, source: Source) -> Iterator[Batch]:
        """All examples of a source, without augmentation."""
        for inputs, targets in reader_of(source, self.eval_batch_size).every(self.seed):
            yield self.formatted(self.prepare(self.to_device(inputs))), self.to_device(targets)

    def formatted(self, inputs: Inputs) -> Inputs:
        """The inputs in the memory format of the networks."""
        return each(inputs, _to_channels_last) if self._channels_last else inputs


def _to_channels_last(part: Tensor) -> Tensor:
    return part.to(memory_format=torch.channels_last) if part.dim() == 4 else part


def _one(inputs: Inputs) -> Tensor:
    if not isinstance(inputs, Tensor):
        raise ConfigError("stacked members take inputs of one tensor, not tensors by name: leave out engine=Stacked")
    return inputs


def _is_in_memory(source: Source) -> bool:
    """Whether examples are fixed tensors in memory."""
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, Arrays)
