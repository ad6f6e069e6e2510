"""What averages along the members' trajectories (SWA, EMA) are worth, and soups of them."""

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
from papa.training.loop import Training
from papa.training.scores import Scores
from papa.training.trajectory import TrajectoryAverage


@dataclass(frozen=True)
class TrajectoryOutcome:
    """How good each member's average along its trajectory is, and soups of these."""

    greedy_members: tuple[int, ...]
    """Who is in the greedy soup, in the order they were added."""
    validation: Scores
    test: Scores | None
    greedy_as_it_is: tuple[tuple[int, ...], Evaluation | None]
    """Who is in the greedy soup when BatchNorm is never re-estimated, so that averages keep the statistics of the
    members they came from, and its test score: what the paper's numbers look like."""
    aligned: Soups | None = None
    """For members that were never averaged, where asked for: soups of averages whose units were matched, repaired."""

    def to_json(self) -> dict[str, Any]:
        """As `result.json` holds it."""
        members, score = self.greedy_as_it_is
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
    """Re-estimate BatchNorm in the averages, make soups of them, and score everything; None where there are none.

    Args:
        training: a training that has run.
        num_batches: how many batches of training data BatchNorm is re-estimated on, without augmentation.
        align_soups: also make soups of averages whose units were matched, and repair them.
        num_align_batches: how many batches of training data units are matched on; None for all there are.
    """
    if not isinstance(training.companion, TrajectoryAverage):
        return None
    population = Population(training.companion.networks, training.group)
    population.dropped = training.population.dropped

    def reset(network: nn.Module, row: Tensor | None = None) -> None:
        reset_batch_norm_(network, training.batches.stream_plain_batches(num_batches))

    def score(network: nn.Module) -> Evaluation:
        return training.evaluate([network], training.data.validation)[0][0]

    test = training.data.test
    as_it_is = greedy_soup(population, score)
    members_as_it_is = as_it_is.members
    test_as_it_is = None if test is None else training.evaluate([as_it_is.network], test)[0][0]
    del as_it_is
    for network in population:
        reset(network)
    aligned = aligned_and_repaired_soups(training, num_align_batches, population) if align_soups else None
    average = average_soup(population, after=reset)
    greedy = greedy_soup(population, score, after=reset)

    def scores_on(source: Source) -> Scores:
        members, ensemble = training.evaluate_population(source, population)
        first, second = training.evaluate([average, greedy.network], source)[0]
        return Scores(members, ensemble, first, second, dropped=population.dropped)

    return TrajectoryOutcome(
        greedy_members=greedy.members,
        validation=scores_on(training.data.validation),
        test=None if test is None else scores_on(test),
        greedy_as_it_is=(members_as_it_is, test_as_it_is),
        aligned=aligned,
    )
