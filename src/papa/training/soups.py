"""Soups of members that were never averaged: repaired, and with their units matched first."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.align import Symmetries, align_
from papa.data.source import Source
from papa.evaluate import Evaluation
from papa.repair import Moments, goals_of, layer_moments, repair_toward_
from papa.soup import GreedySoup, Trial, average_soup, greedy_soup
from papa.training.analysis import exchangeable, member_copy
from papa.training.loop import Training


@dataclass(frozen=True)
class Soups:
    """An average and a greedy soup made in another way (repaired; or aligned and repaired), and their scores."""

    average_soup: nn.Module
    greedy: GreedySoup[nn.Module]
    validation: tuple[Evaluation, Evaluation]
    """The average and the greedy soup on the validation data."""
    test: tuple[Evaluation, Evaluation] | None
    """The same on the test data."""

    def to_json(self) -> dict[str, Any]:
        """As `result.json` holds it."""
        parts = {"validation": self.validation, "test": self.test}
        scores = {
            part: {"average_soup": pair[0].score, "greedy_soup": pair[1].score}
            for part, pair in parts.items()
            if pair is not None
        }
        return {**scores, "greedy_members": sorted(self.greedy.members)}


def repaired_soups(training: Training) -> Soups:
    """Average and greedy soup, each average repaired before it is scored, as the paper does for independent members."""
    batches = training.plain_repair_batches()
    moments = training.group.gather([layer_moments(model, batches) for model in training.population])

    def repair(network: nn.Module, row: Tensor) -> None:
        repair_toward_(network, goals_of(moments, row), batches)

    average = average_soup(training.population, after=repair)
    greedy = greedy_soup(
        training.population,
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        after=repair,
    )
    return _scored(training, average, greedy)


def aligned_soups(training: Training, num_align_batches: int = 10) -> Soups | None:
    """Average and greedy soup of members matched, best first, to the soup of those before them, and repaired.

    As the paper does for VGG and ResNet-18 on CIFAR. All processes must call it.

    Returns:
        The soups; None, with a warning, where it cannot be told which units are exchangeable.
    """
    inputs = training.plain_batches(max(num_align_batches, training.num_repair_batches))
    groups = exchangeable(training.population[0], inputs[0])
    if groups is None:
        return None
    validation = training.data.validation
    readings, _ = training.evaluate_population(validation)
    order = sorted(range(len(readings)), key=lambda member: (-readings[member].score, readings[member].loss, member))
    matching = _Matching(inputs, inputs[: training.num_repair_batches], groups)
    first = member_copy(training, order[0])
    average = greedy = _Growing(first, first, [layer_moments(first, matching.repair_inputs)])
    chosen, best, trials = order[:1], readings[order[0]].score, []
    for member in order[1:]:
        grown = average.joined_by(member_copy(training, member), matching)
        candidate = grown if greedy is average else greedy.joined_by(member_copy(training, member), matching)
        average = grown
        score = training.evaluate([candidate.soup], validation)[0][0].score
        trials.append(Trial((*chosen, member), score, score >= best))
        if score >= best:
            greedy, chosen, best = candidate, [*chosen, member], score
    scores = tuple(reading.score for reading in readings)
    return _scored(training, average.soup, GreedySoup(greedy.soup, tuple(chosen), best, scores, tuple(trials)))


@dataclass(frozen=True)
class _Matching:
    """What members are matched and repaired by."""

    inputs: list[Tensor]
    repair_inputs: list[Tensor]
    groups: Symmetries


@dataclass(frozen=True)
class _Growing:
    """A soup that members join one after the other."""

    mean: nn.Module
    """The average of those in it, as they were matched."""
    soup: nn.Module
    """The same, repaired: what is scored, and what the next member is matched to."""
    moments: list[dict[str, Moments]]
    """The activation statistics of those in it."""

    def joined_by(self, member: nn.Module, matching: _Matching) -> _Growing:
        """The soup with one more member in it, whose units are permuted."""
        align_(member, self.soup, matching.inputs, by="activations", groups=matching.groups)
        moments = [*self.moments, layer_moments(member, matching.repair_inputs)]
        share = 1.0 / len(moments)
        mean = average_soup([self.mean, member], [1.0 - share, share])
        soup = copy.deepcopy(mean)
        goals = goals_of(moments, torch.full((len(moments),), share, dtype=torch.float64))
        repair_toward_(soup, goals, matching.repair_inputs)
        return _Growing(mean, soup, moments)


def _scored(training: Training, average: nn.Module, greedy: GreedySoup[nn.Module]) -> Soups:
    def pair_on(source: Source) -> tuple[Evaluation, Evaluation]:
        first, second = training.evaluate([average, greedy.network], source)[0]
        return first, second

    test = training.data.test
    return Soups(average, greedy, pair_on(training.data.validation), None if test is None else pair_on(test))
