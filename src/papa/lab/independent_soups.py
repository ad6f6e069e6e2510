"""Soups of independent members: repaired, or aligned and repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from papa.align import aligned_soups
from papa.data import Source
from papa.evaluation import Evaluation
from papa.lab.analysis import derive_symmetries
from papa.population import Population
from papa.repair import repair_toward_members
from papa.soup import GreedySoup, average_soup, greedy_soup
from papa.training.loop import Training


@dataclass(frozen=True)
class Soups:
    """The scores of an average soup and a greedy soup; the networks themselves are not kept."""

    greedy_members: tuple[int, ...]
    """The members of the greedy soup, in the order in which they were added."""
    greedy_score: float
    """The greedy soup's score when its members were chosen; a soup of one is that member, unchanged."""
    validation: tuple[Evaluation, Evaluation]
    """The average soup and the greedy soup on the validation data."""
    test: tuple[Evaluation, Evaluation] | None
    """The same on the test data."""

    def to_json(self) -> dict[str, Any]:
        """The entry of `result.json`."""
        parts = {"validation": self.validation, "test": self.test}
        scores = {part: _pair_to_json(*pair) for part, pair in parts.items() if pair is not None}
        return {**scores, "greedy_members": sorted(self.greedy_members)}


def _pair_to_json(average: Evaluation, greedy: Evaluation) -> dict[str, Any]:
    scores: dict[str, Any] = {"average_soup": average.score, "greedy_soup": greedy.score}
    if average.details:
        scores["details"] = {"average_soup": average.details, "greedy_soup": greedy.details}
    return scores


def repaired_soups(training: Training) -> Soups:
    """The average and the greedy soup, each average repaired before it is scored."""
    population = training.population
    repair = repair_toward_members(
        population,
        range(population.size),
        training.batches.plain_repair(),
        scope=training.settings.averaging.repaired_layers,
    )
    average = average_soup(population, after=repair)
    greedy = greedy_soup(
        population,
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        higher_is_better=training.task.higher_is_better,
        after=repair,
    )
    return _scored(training, average, greedy)


def aligned_and_repaired_soups(
    training: Training, num_align_batches: int | None = 10, population: Population | None = None
) -> Soups | None:
    """The average and the greedy soup of members that are aligned to the growing soup, best first, and repaired.

    The paper does this for VGG and ResNet-18 on CIFAR. All processes must call it.

    Args:
        training: provides the data and the scores.
        num_align_batches: the number of batches of training data on which units are matched; None for all.
        population: the members; None for those of the training.

    Returns:
        The soups; None, with a warning, if the symmetries cannot be derived.
    """
    population = training.population if population is None else population
    inputs = training.batches.plain(num_align_batches)
    symmetries = derive_symmetries(population[0], inputs[0])
    if symmetries is None:
        return None
    soups = aligned_soups(
        population,
        lambda network: training.evaluate([network], training.data.validation)[0][0],
        inputs,
        by="activations",
        symmetries=symmetries,
        repair_batches=training.batches.plain_repair(),
        higher_is_better=training.task.higher_is_better,
    )
    return _scored(training, soups.average, soups.greedy)


def _scored(training: Training, average: nn.Module, greedy: GreedySoup[nn.Module]) -> Soups:
    def pair_on(source: Source) -> tuple[Evaluation, Evaluation]:
        first, second = training.evaluate([average, greedy.network], source)[0]
        return first, second

    validation, test = training.data.validation, training.data.test
    return Soups(greedy.members, greedy.score, pair_on(validation), None if test is None else pair_on(test))
