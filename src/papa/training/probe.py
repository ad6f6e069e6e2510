"""What a rule that compares networks measures them by, while `papa.train` trains: the loss on a training batch."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from papa.evaluation.inputs import logits_of
from papa.evaluation.scores import evaluating
from papa.streams import stream
from papa.training.data import Source, reader_of

if TYPE_CHECKING:
    from papa.training.loop import Training


class TrainingLoss:
    """A network's loss on a batch of training data without augmentation, in evaluation mode.

    The batch is a function of the seed and the step: the same for all networks of a step, in every process and after a
    resume. A loader with a sampler of its own gives the same batch at every step.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._batch: tuple[int, list[Any]] = -1, []

    def __call__(self, network: nn.Module) -> float:
        """The loss at the current step."""
        step, training = self._training.step, self._training
        if self._batch[0] != step:
            self._batch = step, list(training.batches.evaluation(self._source(step)))
        with training.autocast(), evaluating(network), torch.no_grad():
            task = training.task
            losses = [task.loss(logits_of(task.apply(network, inputs)), targets) for inputs, targets in self._batch[1]]
            return fmean(map(float, losses))

    def _source(self, step: int) -> Source:
        generator, size = stream(self._training.seed, "check", position=step), self._training.settings.batch_size
        return reader_of(self._training.data.train, size).few(size, generator)
