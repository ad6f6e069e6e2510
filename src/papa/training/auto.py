"""The engine that chooses: both engines take a few steps, and the faster one trains.

The trial leaves no trace: weights, buffers, optimizer state, losses and random streams are put back, and both engines
draw their batches as functions of the step. So the results are those of the engine that was chosen. The choice is part
of a checkpoint, since engines differ by rounding.

Engines take turns, and the best time of each counts, since other load on the machine only adds to it. The trial costs
what it takes to record the stacked step, about as long as 70 to 250 steps of one member, and then 1% of the training.
What was recorded is used further if the stacked engine is chosen. The aim is that training takes at most 5% longer than
with the better engine, if it is not very short; `benchmarks/stacked.py` measures it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch

from papa.core.layout import named_tensors
from papa.core.rules import AveragingContext
from papa.errors import ConfigError, DataError
from papa.streams import accelerators_in_use
from papa.training.data import LoaderBatches
from papa.training.loop import Training
from papa.training.stacked import Stacked

LOOP, STACKED = "loop", "stacked"
LEAST_STEPS = 1000
"""If the members of a process take fewer together, recording a stacked step would be a large part of the training."""
NUM_ROUNDS = 8
SECONDS_PER_TURN = 0.002
"""Shorter steps are repeated, so that what an engine left in the caches counts less."""
SHARE = 0.01
"""A round is the last one after this share of the expected training time."""
CLEARLY = 1.5
"""After two rounds, an engine that is this many times faster is chosen."""


class Auto:
    """Trains with the faster engine, the loop or `Stacked`; pass the class to `papa.train` as `engine`.

    Example:
        >>> from papa import train
        >>> inputs = torch.randn(200, 4)
        >>> targets = (inputs.sum(dim=1) > 0).long()
        >>> outcome = train(
        ...     lambda: torch.nn.Linear(4, 2), (inputs, targets), num_members=3, num_epochs=2, batch_size=1, engine=Auto
        ... )

    What the stacked engine cannot train, data from loaders, and very short trainings are trained by the loop.

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
                self._running().take_over_()  # its step was recorded in the trial
            elif self._stacked is not None:
                self._stacked = Stacked(self.training)  # one that holds nothing of the trial
        elif self.chosen == STACKED:
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
        training, begin = self.training, time.perf_counter()
        reason = self._reason_to_loop()
        seconds = None if reason is not None else self._measure()
        taken = time.perf_counter() - begin
        everyone = training.group.all_gather([(reason or self._refusal, seconds)] * len(training.members))
        for why, found in everyone:
            if found is None:
                return LOOP, why or "the stacked engine failed"
        loop, stacked = (sum(found[engine] for _, found in everyone if found) for engine in (LOOP, STACKED))
        chosen = STACKED if stacked < loop else LOOP
        num = len(everyone)
        times = f"{1e3 * loop / num:.3g} ms per step with the loop, {1e3 * stacked / num:.3g} ms stacked"
        return chosen, f"{times}, measured in {taken:.1f} s"

    def _reason_to_loop(self) -> str | None:
        """Why the loop is the only choice; None if the engines must be compared."""
        training, rule = self.training, self.training.averager.rule
        if self._stacked is None:
            return self._refusal
        if len(training.members) == 1:
            return "one member per process"
        if self._num_steps_left() * len(training.members) < LEAST_STEPS:
            return f"the members of a process take fewer than {LEAST_STEPS} steps together"
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
        try:
            with torch.random.fork_rng(devices=accelerators_in_use()):
                self._stacked.start_()
                for step in steps.values():  # a warm-up, which also records the stacked step
                    step()
                begin = time.perf_counter()
                for number in range(1, NUM_ROUNDS + 1):
                    for name, step in steps.items():
                        best[name] = min(best[name], self._timed(step))
                    slow, fast = max(best.values()), min(best.values())
                    is_clear = number > 1 and slow > CLEARLY * fast
                    if is_clear or time.perf_counter() - begin > SHARE * fast * self._num_steps_left():
                        break
        except (ConfigError, DataError) as error:
            self._refusal = str(error)
            return None
        finally:
            put_back()
        return best

    def _num_steps_left(self) -> int:
        return self.training.length.num_steps - self.training.step

    def _timed(self, step: Callable[[], None]) -> float:
        """The seconds of a step, in the mean over a turn."""
        device, taken, number = self.training.device, 0.0, 0
        # Other load on the machine does not add to the time of a single thread.
        clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        while taken < SECONDS_PER_TURN:
            step()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            number += 1
            taken = clock() - start
        return taken / number


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
