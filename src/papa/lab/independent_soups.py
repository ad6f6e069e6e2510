"""Soups of members that were never averaged: repaired, and with their units matched first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from papa.align import aligned_soups
from papa.data import Source
from papa.evaluation import Evaluation
from papa.group import gather_or_raise
from papa.lab.analysis import exchangeable
from papa.population import Population
from papa.repair import goals_of, layer_statistics, repair_toward_
from papa.soup import GreedySoup, average_soup, greedy_soup
from papa.training.loop import Training


@dataclass(frozen=True)
class Soups:
    """How good an average and a greedy soup are that were made in another way: repaired; or aligned and repaired.

    The networks themselves are not kept: `papa.average_soup`, `papa.greedy_soup` and `papa.aligned_soups` make them.
    """

    greedy_members: tuple[int, ...]
    """Who is in the greedy soup, in the order they were added."""
    greedy_score: float
    """What it scored when they were chosen; a soup of one is that member as it is."""
    validation: tuple[Evaluation, Evaluation]
    """The average and the greedy soup on the validation data."""
    test: tuple[Evaluation, Evaluation] | None
    """The same on the test data."""

    def to_json(self) -> dict[str, Any]:
        """As `result.json` holds it."""
        parts = {"validation": self.validation, "test": self.test}
        scores = {part: _pair_to_json(*pair) for part, pair in parts.items() if pair is not None}
        return {**scores, "greedy_members": sorted(self.greedy_members)}


def _pair_to_json(average: Evaluation, greedy: Evaluation) -> dict[str, Any]:
    scores: dict[str, Any] = {"average_soup": average.score, "greedy_soup": greedy.score}
    if average.details:
        scores["details"] = {"average_soup": average.details, "greedy_soup": greedy.details}
    return scores


def repaired_soups(training: Training) -> Soups:
    """Average and greedy soup, each average repaired before it is scored, as the paper does for independent members."""
    batches = training.batches.plain_repair_batches()
    moments = gather_or_raise(
        training.group, lambda: [layer_statistics(model, batches) for model in training.population]
    )

    def repair(network: nn.Module, row: Tensor) -> None:
        repair_toward_(network, goals_of(moments, row), batches, scope=training.merging.repaired_layers, restores=False)

    average = average_soup(training.population, after=repair)
    greedy = greedy_soup(
        training.population,
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        after=repair,
    )
    return _scored(training, average, greedy)


def aligned_and_repaired_soups(
    training: Training, num_align_batches: int | None = 10, population: Population | None = None
) -> Soups | None:
    """Average and greedy soup of members matched, best first, to the soup of those before them, and repaired.

    As the paper does for VGG and ResNet-18 on CIFAR. All processes must call it.

    Args:
        training: whose data and scores.
        num_align_batches: how many batches of training data units are matched on; None for all there are.
        population: whose soups; None for the training's own.

    Returns:
        The soups; None, with a warning, where it cannot be told which units are exchangeable.
    """
    population = training.population if population is None else population
    inputs = training.batches.plain_batches(num_align_batches)
    groups = exchangeable(population[0], inputs[0])
    if groups is None:
        return None
    soups = aligned_soups(
        population,
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        inputs,
        by="activations",
        groups=groups,
        repair_batches=training.batches.plain_repair_batches(),
    )
    return _scored(training, soups.average, soups.greedy)


def _scored(training: Training, average: nn.Module, greedy: GreedySoup[nn.Module]) -> Soups:
    def pair_on(source: Source) -> tuple[Evaluation, Evaluation]:
        first, second = training.evaluate([average, greedy.network], source)[0]
        return first, second

    test = training.data.test
    return Soups(
        greedy.members, greedy.score, pair_on(training.data.validation), None if test is None else pair_on(test)
    )
