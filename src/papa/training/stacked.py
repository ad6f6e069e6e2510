"""The stacked engine: all local members take a step in one vectorised call.

The matrix holds each parameter of all members as one strided tensor, `(members, *shape)`. Tiny networks with tiny
batches are mostly overhead when trained one after the other; stacked, ten cost little more than one. Results equal the
loop's to float tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.errors import ConfigError, DataError
from papa.evaluation.inputs import Inputs
from papa.evaluation.scores import Batch
from papa.streams import derive
from papa.training.data import Arrays, Source, Subset
from papa.training.draws import Draws, Watch
from papa.training.loop import Training
from papa.training.stacked_optimizer import StackedOptimizer, clipped
from papa.training.traced import Recorded, record

EXAMPLES_AHEAD = 4096
"""The number of examples to gather and prepare at once, if nothing about them is random."""


@dataclass(frozen=True)
class _Step:
    """A step that was recorded."""

    trained: list[str]
    """The names of parameters that get a gradient."""
    frozen: list[str]
    """The names of other parameters."""
    draws: Draws
    run: Recorded


class Stacked:
    """Trains all local members at once; pass the class to `papa.train` as `engine`.

    Example:
        >>> from papa import train
        >>> inputs = torch.randn(200, 4)
        >>> targets = (inputs.sum(dim=1) > 0).long()
        >>> outcome = train(
        ...     lambda: nn.Linear(4, 2), (inputs, targets), num_members=3, num_epochs=2, batch_size=1, engine=Stacked
        ... )

    A network's Python code runs when its step is recorded, not in every step: callbacks on modules and counters kept in
    Python see no steps, and the parameters' `.grad` stays None. Random numbers, such as dropout masks, are those that
    the loop draws. Optimizers that look at whole tensors, and float16 with its gradient scaler are refused.

    Args:
        training: the training whose members take steps.
    """

    def __init__(self, training: Training) -> None:
        if any(scaler is not None for scaler in training.scalers):
            raise ConfigError(
                "the stacked engine has no gradient scaler, which float16 needs: use bfloat16 or float32, or the loop "
                "engine"
            )
        if training.settings.accumulate > 1:
            raise ConfigError(
                f"the stacked engine takes one batch per step, got accumulate={training.settings.accumulate}: use the "
                "loop engine, or a larger batch"
            )
        if training.settings.averaging.align is not None:
            raise ConfigError(
                "the stacked engine holds the optimizers' state, which alignment would have to permute: use the loop "
                "engine, or no alignment"
            )
        self.training = training
        self.optimizer = StackedOptimizer(training.population, training.optimizers)
        self._steps: dict[tuple[Any, ...], _Step] = {}
        self._batches: Iterator[Batch] = iter(())

    def start_(self) -> None:
        """Take over the members' optimizer state; steps are recorded again."""
        self._steps.clear()
        self.take_over_()

    def take_over_(self) -> None:
        """Take over the members' optimizer state, and start from the current step."""
        population = self.training.population
        population.refresh_()
        self.optimizer.take_over_()
        self._buffers = [dict(model.named_buffers()) for model in population]
        self._modules = [list(model.modules()) for model in population]
        data = self.training.data
        is_plain = not self.training.batches.is_augmented and not data.parts and _is_in_memory(data.train)
        self._batches = self._plain_batches() if is_plain else self._drawn_batches()

    def hand_back_(self) -> None:
        """Return the optimizer state to the members' optimizers."""
        self.optimizer.hand_back_()

    def reset_member_(self, index: int) -> None:
        """Clear a member's optimizer state; step counters are shared by all members."""
        self.optimizer.forget_(index)

    def step_(self) -> None:
        """Take a step with every local member."""
        training, leaves = self.training, self.optimizer.leaves
        if self.optimizer.follow_matrix_():
            self._steps.clear()  # they were recorded for another memory order
        inputs, targets = next(self._batches)
        step = self._step_for(inputs, targets)
        trained, others = [leaves[name] for name in step.trained], [leaves[name] for name in step.frozen]
        step.draws.draw_(derive(training.seed, "forward", member, training.step) for member in training.members)
        buffers = self._stacked_buffers()
        with torch.no_grad():
            *gradients, losses = step.run(*trained, *others, *buffers.values(), inputs, targets, *step.draws.tensors)
            for name, buffer in buffers.items():
                for own, value in zip(self._buffers, buffer, strict=True):
                    own[name].copy_(value)
            if training.settings.numerics.clip_norm is not None:
                gradients = clipped(gradients, training.settings.numerics.clip_norm)
        for leaf in others:
            leaf.grad = None
        for leaf, gradient in zip(trained, gradients, strict=True):
            leaf.grad = gradient
        self.optimizer.step()
        training.add_losses_(losses)

    def _stacked_buffers(self) -> dict[str, Tensor]:
        """Contiguous copies: `vmap` would drop what a forward pass writes to strided ones."""
        return {name: torch.stack([own[name] for own in self._buffers]) for name in self._buffers[0]}

    def _switches(self, index: int) -> tuple[bool, ...]:
        """Which parameters a member trains, and the mode of its modules; both may change between steps."""
        trained = [parameter.requires_grad for parameter in self.optimizer.parameters[index].values()]
        return (*trained, *[module.training for module in self._modules[index]])

    def _step_for(self, inputs: Tensor, targets: Tensor) -> _Step:
        """The step recorded for batches of this shape."""
        key = (inputs.shape, inputs.dtype, targets.shape, targets.dtype, self._switches(0))
        if key not in self._steps:
            for index in range(1, len(self._modules)):
                if self._switches(index) != self._switches(0):
                    raise ConfigError(
                        f"member {self.training.members[index]} trains other parameters than member "
                        f"{self.training.members[0]}, or has modules in another mode: use the loop engine"
                    )
            self._steps[key] = self._record(inputs, targets)
        return self._steps[key]

    def _record(self, inputs: Tensor, targets: Tensor) -> _Step:
        leaves, loss_of = self.optimizer.leaves, self.training.loss_of
        network = copy.deepcopy(self.training.population[0])
        with Watch() as watch:
            names = _names_with_gradient(copy.deepcopy(network), self.training, inputs[0], targets[0])
        draws = Draws(watch.draws, num_members=len(self._modules))
        trained = {name: leaves[name] for name in names}
        frozen = {name: leaf for name, leaf in leaves.items() if name not in trained}
        others = {**frozen, **self._stacked_buffers()}
        run = record(network, loss_of, trained=trained, others=others, inputs=inputs, targets=targets, draws=draws)
        return _Step(names, list(frozen), draws, run)

    def _plain_batches(self) -> Iterator[Batch]:
        """All members' batches, gathered and prepared many steps at a time; used if nothing about them is random."""
        training = self.training
        while True:
            epoch, position = divmod(training.step, training.length.steps_per_epoch)
            orders = torch.stack([training.batches.order(member, epoch) for member in training.members])
            steps = orders.view(len(orders), -1, training.settings.batch_size).transpose(0, 1)[position:]
            for part in steps.split(max(1, EXAMPLES_AHEAD // steps[0].numel())):  # type: ignore[no-untyped-call]
                inputs, targets = training.data.train.batch(part.flatten())
                inputs = _one(training.batches.prepare(training.batches.to_device(inputs)))
                targets = targets.to(training.device)
                stacked = (each.view(*part.shape, *each.shape[1:]) for each in (inputs, targets))
                yield from zip(*stacked, strict=True)

    def _drawn_batches(self) -> Iterator[Batch]:
        """Each member's batch as the loop draws it, stacked."""
        training = self.training
        while True:
            drawn = [training.batches.training_batch(index, training.step) for index in range(len(training.population))]
            batches = [(_one(inputs), targets) for inputs, targets in drawn]
            forms = [f"{tuple(targets.shape)} of {targets.dtype}" for _, targets in batches]
            for index, form in enumerate(forms):
                if form != forms[0] or batches[index][0].shape != batches[0][0].shape:
                    raise DataError(
                        f"member {training.members[index]} trains on inputs of shape {tuple(batches[index][0].shape)} "
                        f"and targets {form}, member {training.members[0]} on {tuple(batches[0][0].shape)} and "
                        f"{forms[0]}: stacked members need batches of one shape, use the loop engine"
                    )
            inputs, targets = zip(*batches, strict=True)
            yield torch.stack(inputs), torch.stack(targets)


def _one(inputs: Inputs) -> Tensor:
    if not isinstance(inputs, Tensor):
        raise ConfigError("stacked members take inputs of one tensor, not tensors by name: use the loop engine")
    return inputs


def _is_in_memory(source: Source) -> bool:
    """Whether examples are fixed tensors in memory."""
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, Arrays)


def _names_with_gradient(network: nn.Module, training: Training, inputs: Tensor, targets: Tensor) -> list[str]:
    """Parameters that get a gradient; the others are not updated, as in the loop, not even by weight decay."""
    network.zero_grad(set_to_none=True)
    with torch.enable_grad():
        training.loss_of(network, inputs, targets).backward()  # type: ignore[no-untyped-call]
    return [name for name, parameter in network.named_parameters() if parameter.grad is not None]
