"""Scores of members just before, just after and a few steps after each merge (the paper's Figure 2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papa.core.averager import Averaging, MergeHook
from papa.core.population import Population
from papa.core.rules import AveragingContext
from papa.errors import ConfigError
from papa.streams import stream
from papa.training import Callback, Training
from papa.training.data import Source, Subset

Event: TypeAlias = dict[str, Any]


class MergeProbes(Callback):
    """Scores every member around merges, on the test data or, if there is none, on the validation data.

    It logs two events for each merge, each as soon as it is known, so that a resumed run logs the same:

        {"event": "merge", "step", "epoch", "data", "before", "after_unrepaired", "after"}
        {"event": "merge-later", "step", "merge_step", "data", "scores"}

    with one score per member; `after_unrepaired` is there if merge hooks change members after they are mixed.
    `papa.lab.result.fold_merges` joins both. Training itself is not changed.

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

    The number of steps after a merge must be smaller than from one merge to the next.
    """

    def __init__(self, log: Callable[[Event], object], *, steps_later: int = 10, num_examples: int = 1000) -> None:
        if steps_later < 1 or num_examples < 1:
            raise ConfigError(
                f"probes got steps_later {steps_later} and num_examples {num_examples}, expected at least 1 of each"
            )
        self.log, self.steps_later, self.num_examples = log, steps_later, num_examples
        self._scores: dict[str, list[float]] = {}

    def on_train_begin(self, training: Training) -> None:
        """Add a hook outside all other merge hooks, and one inside."""
        averager = training.averager
        if not averager.rule.is_merge:
            return
        if self.steps_later >= averager.rule.every_steps:
            raise ConfigError(
                f"probes score {self.steps_later} steps after a merge, but members are merged every "
                f"{averager.rule.every_steps} steps: use fewer steps"
            )
        inside = [self._hook(training, after="after_unrepaired")] if averager.merge_hooks else []
        averager.merge_hooks = [self._hook(training, before="before", after="after"), *averager.merge_hooks, *inside]

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        if training.averager.rule.is_merge:
            self._log(training, {"event": "merge", "step": averaging.step, "epoch": training.epoch}, self._scores)

    def on_step_end(self, training: Training) -> None:
        # Whether there was a merge follows from the step, so nothing needs to be remembered.
        merge_step, averager = training.step - self.steps_later, training.averager
        if averager.rule.is_merge and averager.rule.is_due(merge_step, averager.num_steps):
            event = {"event": "merge-later", "step": training.step, "merge_step": merge_step}
            self._log(training, event, {"scores": self._score(training)})

    def _log(self, training: Training, event: Event, scores: Mapping[str, list[float]]) -> None:
        if training.group.is_leader:
            data = "validation" if training.data.test is None else "test"
            self.log({**event, "data": data, **scores})

    def _score(self, training: Training) -> list[float]:
        members, _ = training.evaluate_population(probe_source(training, self.num_examples))
        return [member.score for member in members]

    def _hook(self, training: Training, *, after: str, before: str | None = None) -> MergeHook:
        @contextlib.contextmanager
        def hook(population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
            if before is not None:
                self._scores = {before: self._score(training)}
            yield
            self._scores[after] = self._score(training)

        return hook


def probe_source(training: Training, num_examples: int) -> Source:
    """Some examples of the test data, or of the validation data if there is none: the same on every call."""
    source = training.data.validation if training.data.test is None else training.data.test
    if len(source) <= num_examples:
        return source
    order = torch.randperm(len(source), generator=stream(training.seed, "probe"), device="cpu")
    return Subset(source, order[:num_examples])
