"""Scores of averages along the members' trajectories (SWA, EMA), and of soups of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from papa.data import Source
from papa.evaluation import Evaluation
from papa.lab.independent_soups import Soups, aligned_and_repaired_soups
from papa.population import Population
from papa.repair import reset_batch_norm_
from papa.soup import average_soup, greedy_soup
from papa.training import Scores, Training, TrajectoryAverage


@dataclass(frozen=True)
class TrajectoryOutcome:
    """The scores of each member's average along its trajectory, and of soups of these."""

    greedy_members: tuple[int, ...]
    """The members of the greedy soup, in the order in which they were added."""
    validation: Scores
    test: Scores | None
    greedy_without_reset: tuple[tuple[int, ...], Evaluation | None]
    """The greedy soup if BatchNorm is never re-estimated, so that averages keep their member's statistics: its members
    and its test score. The paper's numbers look like this."""
    aligned: Soups | None = None
    """For independent members, optional: aligned and repaired soups of the averages."""

    def to_json(self) -> dict[str, Any]:
        """As in `result.json`."""
        members, score = self.greedy_without_reset
        return {
            "validation": self.validation.to_json(),
            "test": None if self.test is None else self.test.to_json(),
            "greedy_members": sorted(self.greedy_members),
            "greedy_as_it_is": {"test": None if score is None else score.score, "members": sorted(members)},
            "aligned": None if self.aligned is None else self.aligned.to_json(),
        }


def score_trajectory_averages(
    training: Training, num_batches: int, *, align_soups: bool = False, num_align_batches: int | None = 10
) -> TrajectoryOutcome | None:
    """Re-estimate BatchNorm in the averages, make soups of them, and score everything; None if there are none.

    Args:
        training: a training that has run.
        num_batches: the number of batches of training data BatchNorm is re-estimated on, without augmentation.
        align_soups: also make aligned and repaired soups.
        num_align_batches: the number of batches of training data units are matched on; None for all.
    """
    averages = next((callback for callback in training.callbacks if isinstance(callback, TrajectoryAverage)), None)
    if averages is None:
        return None
    population = Population(averages.networks, training.group)
    population.dropped = training.population.dropped

    def reset(network: nn.Module, row: Tensor | None = None) -> None:
        reset_batch_norm_(network, training.batches.stream_plain(num_batches))

    def score(network: nn.Module) -> Evaluation:
        return training.evaluate([network], training.data.validation)[0][0]

    test, is_higher_better = training.data.test, training.task.higher_is_better
    without_reset = greedy_soup(population, score, higher_is_better=is_higher_better)
    members_without_reset = without_reset.members
    test_without_reset = None if test is None else training.evaluate([without_reset.network], test)[0][0]
    del without_reset
    for network in population:
        reset(network)
    aligned = aligned_and_repaired_soups(training, num_align_batches, population) if align_soups else None
    average = average_soup(population, after=reset)
    greedy = greedy_soup(population, score, higher_is_better=is_higher_better, after=reset)

    def scores_on(source: Source) -> Scores:
        members, ensemble = training.evaluate_population(source, population)
        first, second = training.evaluate([average, greedy.network], source)[0]
        return Scores(members, ensemble, first, second, dropped=population.dropped)

    return TrajectoryOutcome(
        greedy_members=greedy.members,
        validation=scores_on(training.data.validation),
        test=None if test is None else scores_on(test),
        greedy_without_reset=(members_without_reset, test_without_reset),
        aligned=aligned,
    )
