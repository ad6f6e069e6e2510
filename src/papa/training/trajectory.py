"""Averages along each member's own trajectory: SWA and exponential moving averages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from papa.errors import ConfigError
from papa.training.callbacks import Callback
from papa.training.loop import Training


class TrajectoryAverage(Callback):
    """Averages each member's weights over time.

        SWA:  average <- mean of the weights after each epoch from `start` on
        EMA:  average <- decay average + (1 - decay) weights, after each step

    It is independent of averaging over members, and the paper finds that the two add up. BatchNorm statistics are not
    averaged: they are those of the member until they are re-estimated.

    Example:
        >>> import torch
        >>> from papa import train
        >>> inputs = torch.randn(200, 4)
        >>> data = inputs, (inputs.sum(dim=1) > 0).long()
        >>> average = TrajectoryAverage(start=0.5)
        >>> _ = train(lambda: nn.Linear(4, 2), data, num_members=2, num_epochs=4, batch_size=20, callbacks=[average])
        >>> len(average.networks), int(average.num_averaged(0))
        (2, 3)

    Args:
        decay: of an exponential moving average; None for SWA's equal weights.
        start: when to begin, as a share of training.
    """

    def __init__(self, *, decay: float | None = None, start: float = 0.0) -> None:
        if decay is not None and not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay is {decay}, expected 0 to below 1, or None for equal weights")
        if not 0.0 <= start < 1.0:
            raise ConfigError(f"start is {start}, expected a share of training from 0 to below 1")
        self.decay, self.start = decay, start
        self._averages: list[AveragedModel] = []
        self._tensors: list[list[list[Tensor]]] = []
        """For each member: weights and buffers of its average, then its own."""

    @property
    def networks(self) -> list[nn.Module]:
        """The averages of the local members."""
        return [average.module for average in self._averages]

    def num_averaged(self, index: int) -> int:
        """The number of weights that went into an average."""
        return int(self._averages[index].n_averaged)

    def setup(self, training: Training) -> None:
        """Copy the members."""
        self._averages = [self._average_of(model) for model in training.population]
        pairs = zip(self._averages, training.population, strict=True)
        self._tensors = [_tensors_of(average.module, model) for average, model in pairs]

    def _average_of(self, model: nn.Module) -> AveragedModel:
        average = None if self.decay is None else get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return AveragedModel(model, multi_avg_fn=average)

    def reset_member_(self, index: int, model: nn.Module) -> None:
        """Start a member's average again."""
        self._averages[index] = self._average_of(model)
        self._tensors[index] = _tensors_of(self._averages[index].module, model)

    def on_step_end(self, training: Training) -> None:
        """Update the averages when it is time."""
        every_steps = training.length.steps_per_epoch if self.decay is None else 1
        if training.step >= max(round(self.start * training.length.num_steps), 1) and training.step % every_steps == 0:
            for index, model in enumerate(training.population):
                self._update_(index, model)

    @torch.no_grad()
    def _update_(self, index: int, model: nn.Module) -> None:
        """Include a member's weights; the step of an EMA has the bits of torch's own, and searches no modules."""
        average = self._averages[index]
        if self.decay is None or not average.n_averaged:
            average.update_parameters(model)
            return
        means, old, weights, buffers = self._tensors[index]
        torch._foreach_lerp_(means, weights, 1.0 - self.decay)
        if old:
            torch._foreach_copy_(old, buffers)
        average.n_averaged += 1

    def member_state(self, index: int) -> dict[str, Tensor]:
        """A member's average."""
        return dict(self._averages[index].state_dict())

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore a member's average."""
        self._averages[index].load_state_dict(dict(tensors))


def _tensors_of(average: nn.Module, model: nn.Module) -> list[list[Tensor]]:
    return [list(found) for net in (average, model) for found in (net.parameters(), net.buffers())]
