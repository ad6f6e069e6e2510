"""How good members are just before, just after and a few steps after each merge (the paper's Figure 2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.averager import Averaging, MergeHook, chain
from papa.data import Source, Subset
from papa.errors import ConfigError
from papa.population import Population
from papa.rules import AveragingContext, Independent
from papa.streams import stream
from papa.training.loop import Callback, Training
from papa.training.options import EpochRecord

Event: TypeAlias = dict[str, Any]


class MergeProbes(Callback):
    """Scores every member around merges, on the test data or, where there is none, on the validation data.

    It logs two events for each merge, each when it is known, so that a run that is resumed in between logs the same:

        {"event": "merge", "step", "epoch", "data", "before", "after_unrepaired", "after"}
        {"event": "merge-later", "step", "merge_step", "data", "scores"}

    with one score per member; `after_unrepaired` is there when something is done to members after they are mixed.
    `papa.lab.runs.fold_merges` makes one of both. Training itself is not changed. A callback that saves checkpoints must come
    after this one, so that what belongs to a checkpoint's step is logged before it.

    Example:
        >>> from torch import nn
        >>> from papa import MergeAll, train
        >>> inputs = torch.randn(200, 4)
        >>> data = inputs, (inputs.sum(dim=1) > 0).long()
        >>> events = []
        >>> probes = MergeProbes(events.append, steps_later=2)
        >>> options = {"num_members": 2, "num_epochs": 1, "batch_size": 20, "rule": MergeAll(every_steps=5)}
        >>> _ = train(lambda: nn.Linear(4, 2), data, callbacks=[probes], **options)
        >>> [event["event"] for event in events]
        ['merge', 'merge-later']

    Args:
        log: given every event, in the process that leads.
        steps_later: how many optimizer steps later members are scored again; fewer than from one merge to the next.
        num_examples: how many examples are looked at, at most.
    """

    def __init__(self, log: Callable[[Event], object], *, steps_later: int = 10, num_examples: int = 1000) -> None:
        if steps_later < 1 or num_examples < 1:
            raise ConfigError(
                f"probes got steps_later {steps_later} and num_examples {num_examples}, expected at least 1 of each"
            )
        self.log, self.steps_later, self.num_examples = log, steps_later, num_examples
        self._scores: dict[str, list[float]] = {}

    def on_start(self, training: Training) -> None:
        """Stand outside of all that happens around merges, and inside."""
        averager = training.averager
        if not _merges(training):
            return
        if self.steps_later >= averager.rule.every_steps:
            raise ConfigError(
                f"probes look {self.steps_later} steps after a merge, but members are merged every "
                f"{averager.rule.every_steps} steps: look earlier"
            )
        outside = self._around(training, before="before", after="after")
        if averager.merge_hooks is None:
            averager.merge_hooks = outside
        else:
            averager.merge_hooks = chain(
                outside, averager.merge_hooks, self._around(training, after="after_unrepaired")
            )

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """Log what was seen around a merge."""
        if _merges(training):
            self._tell(training, {"event": "merge", "step": averaging.step, "epoch": training.epoch}, self._scores)

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """Look again when a merge was some steps ago."""
        self._look_later(training)

    def after_step(self, training: Training) -> None:
        """Look again when a merge was some steps ago."""
        if training.step % training.length.steps_per_epoch:
            self._look_later(training)

    def _look_later(self, training: Training) -> None:
        # Whether there was a merge is known from the step alone, so nothing needs to be remembered.
        merge_step, averager = training.step - self.steps_later, training.averager
        if _merges(training) and averager.rule.is_due(merge_step, averager.num_steps):
            scores = {"scores": self._look(training)}
            self._tell(training, {"event": "merge-later", "step": training.step, "merge_step": merge_step}, scores)

    def _tell(self, training: Training, event: Event, scores: Mapping[str, list[float]]) -> None:
        if training.group.is_leader:
            data = "validation" if training.data.test is None else "test"
            self.log({**event, "data": data, **scores})

    def _look(self, training: Training) -> list[float]:
        members, _ = training.evaluate_population(probe_source(training, self.num_examples))
        return [member.score for member in members]

    def _around(self, training: Training, *, after: str, before: str | None = None) -> MergeHook:
        @contextlib.contextmanager
        def around(population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
            if before is not None:
                self._scores = {before: self._look(training)}
            yield
            self._scores[after] = self._look(training)

        return around


def _merges(training: Training) -> bool:
    return training.averager.rule.is_merge and not isinstance(training.averager.rule, Independent)


def probe_source(training: Training, num_examples: int) -> Source:
    """Some examples of the test data, or of the validation data where there is none: the same on every call."""
    source = training.data.validation if training.data.test is None else training.data.test
    if len(source) <= num_examples:
        return source
    order = torch.randperm(len(source), generator=stream(training.seed, "probe"), device="cpu")
    return Subset(source, order[:num_examples])
