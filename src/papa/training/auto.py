"""The engine that chooses: both engines take a few steps, and the faster one trains.

The trial leaves no trace: weights, buffers, optimizer state, losses and random streams are put back, and both engines
draw their batches as functions of the step. So the results are those of the engine that was chosen. The choice is part
of a checkpoint, since engines differ by rounding.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch

from papa.data import LoaderBatches
from papa.errors import ConfigError, DataError
from papa.layout import named_tensors
from papa.rules import AveragingContext
from papa.streams import accelerators_in_use
from papa.training.loop import Training
from papa.training.stacked import Stacked

LOOP, STACKED = "loop", "stacked"
LEAST_STEPS = 100
"""In shorter trainings, choosing would take longer than it saves."""
NUM_ROUNDS = 5
SECONDS_PER_TRIAL = 1.0
"""A round is the last one after this time."""
CLEARLY = 1.5
"""An engine that is this many times faster in a round is chosen at once."""


class Auto:
    """Trains with the faster engine, the loop or `Stacked`; pass the class to `papa.train` as `engine`.

    Example:
        >>> from papa import train
        >>> inputs = torch.randn(200, 4)
        >>> targets = (inputs.sum(dim=1) > 0).long()
        >>> outcome = train(
        ...     lambda: torch.nn.Linear(4, 2), (inputs, targets), num_members=3, num_epochs=2, batch_size=1, engine=Auto
        ... )

    What the stacked engine cannot train, and data from loaders, is trained by the loop.

    Args:
        training: the training whose members take steps.
    """

    can_loop = True
    """Whatever the rule, there is an engine for it."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.chosen: str | None = None
        """`loop` or `stacked`; None before training."""
        self._stacked: Stacked | None = None
        self._refusal: str | None = None
        try:
            self._stacked = Stacked(training)
        except ConfigError as error:
            self._refusal = str(error)

    def start_(self) -> None:
        """Choose, unless a checkpoint has the choice; and report it."""
        if self.chosen is None:
            self.chosen, reason = self._choose()
            text = f"engine: {self.chosen} ({reason})"
            self.training.report({"event": "notice", "step": self.training.step, "text": text})
        if self.chosen == STACKED:
            self._running().start_()

    def hand_back_(self) -> None:
        """Return the optimizer state to the members' optimizers."""
        if self.chosen == STACKED:
            self._running().hand_back_()

    def reset_member_(self, index: int) -> None:
        """Clear a member's optimizer state, where the engine holds it."""
        if self.chosen == STACKED:
            self._running().reset_member_(index)

    def step_(self) -> None:
        """Take a step with every local member."""
        if self.chosen == STACKED:
            self._running().step_()
        else:
            self.training.step_each_()

    def _running(self) -> Stacked:
        if self._stacked is None:
            raise ConfigError(
                f"the checkpoint was trained by the stacked engine, which cannot train it here: {self._refusal}"
            )
        return self._stacked

    def _choose(self) -> tuple[str, str]:
        """The engine and why; the same on all processes."""
        training = self.training
        reason = self._reason_to_loop()
        seconds = None if reason is not None else self._measure()
        everyone = training.group.all_gather([(reason or self._refusal, seconds)] * len(training.members))
        for why, found in everyone:
            if found is None:
                return LOOP, why or "the stacked engine failed"
        loop, stacked = (sum(found[engine] for _, found in everyone if found) for engine in (LOOP, STACKED))
        chosen = STACKED if stacked < loop else LOOP
        num = len(everyone)
        return chosen, f"{1e3 * loop / num:.3g} ms per step with the loop, {1e3 * stacked / num:.3g} ms stacked"

    def _reason_to_loop(self) -> str | None:
        """Why the loop is the only choice; None if the engines must be compared."""
        training, rule = self.training, self.training.averager.rule
        if self._stacked is None:
            return self._refusal
        if len(training.members) == 1:
            return "one member per process"
        if training.length.num_steps - training.step < LEAST_STEPS:
            return f"fewer than {LEAST_STEPS} steps"
        if isinstance(training.data.train, LoaderBatches):
            return "the data comes from a loader"
        context = AveragingContext(step=max(1, training.step), size=training.population.size, lr_ratio=1.0)
        if getattr(rule, "move_momentum", False) or "gradient_norms" in rule.looks_at(context):
            return "the rule needs gradients or momenta"
        return None

    def _measure(self) -> dict[str, float] | None:
        """The seconds of a step with each engine; None if the stacked engine cannot train these networks."""
        assert self._stacked is not None
        steps = {LOOP: self.training.step_each_, STACKED: self._stacked.step_}
        put_back = _kept(self.training)
        best = dict.fromkeys(steps, float("inf"))
        begin = time.perf_counter()
        try:
            with torch.random.fork_rng(devices=accelerators_in_use()):
                self._stacked.start_()
                for number in range(NUM_ROUNDS + 1):  # the first is a warm-up
                    for name, step in steps.items():
                        seconds = self._timed(step)
                        best[name] = min(best[name], seconds) if number else best[name]
                    is_clear = number and max(best.values()) > CLEARLY * min(best.values())
                    if is_clear or (number and time.perf_counter() - begin > SECONDS_PER_TRIAL):
                        break
        except (ConfigError, DataError) as error:
            self._refusal = str(error)
            return None
        finally:
            put_back()
        return best

    def _timed(self, step: Callable[[], None]) -> float:
        device = self.training.device
        start = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start


def _kept(training: Training) -> Callable[[], None]:
    """Keep everything that a step changes; returns a function that puts it back, bit for bit."""
    population = training.population
    tensors = [{name: tensor.detach().clone() for name, tensor in named_tensors(net).items()} for net in population]
    states = [{p: copy.deepcopy(state) for p, state in one.state.items()} for one in training.optimizers]
    losses, recent = training.loss_sums.clone(), training.recent_losses.clone()
    counts = training.averager._diagnostics.counts
    counts_before = list(counts)

    @torch.no_grad()
    def put_back() -> None:
        for model, before in zip(population, tensors, strict=True):
            for name, tensor in named_tensors(model).items():
                tensor.copy_(before[name])
            model.zero_grad(set_to_none=True)
        for optimizer, state in zip(training.optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
        training.loss_sums.copy_(losses)
        training.recent_losses.copy_(recent)
        counts[:] = counts_before

    return put_back
