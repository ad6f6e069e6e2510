"""What a training ends with: the soups, and how good everything is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from papa.data import Source
from papa.errors import PapaError
from papa.lab.analysis import Analysis, analyse
from papa.lab.independent_soups import Soups, aligned_and_repaired_soups, repaired_soups
from papa.lab.trajectory_scores import TrajectoryOutcome, score_trajectory_averages
from papa.population import Population
from papa.repair import RepairReport, repair_plan
from papa.rules import Independent
from papa.soup import GreedySoup, average_soup, greedy_soup
from papa.training.loop import Training
from papa.training.scores import Scores


@dataclass(frozen=True)
class Outcome:
    """A trained population, the networks made of it, and their scores."""

    population: Population
    """The members."""
    average_soup: nn.Module
    """The mean of all members."""
    greedy: GreedySoup[nn.Module]
    """The greedy soup on the validation data, and how it came about."""
    validation: Scores
    """Scores on what was held out from training."""
    test: Scores | None
    """Scores on the test data, where there is any."""
    seconds: dict[str, float]
    """Where the time went."""
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    """Members that were found sick, when, why, and what was done."""
    repaired: Soups | None = None
    """For members that were never averaged, and where REPAIR is asked for: how good the soups are that it gives."""
    aligned: Soups | None = None
    """The same of members whose units were matched to the growing soup, where asked for."""
    analysis: Analysis | None = None
    """What members share, where asked for."""
    repair: RepairReport | None = None
    """Where REPAIR was used: what it does to each layer."""
    trajectory: TrajectoryOutcome | None = None
    """Where weights were averaged along each member's trajectory (SWA, EMA): these averages, and their soups."""

    def to_json(self) -> dict[str, Any]:
        """The part of `result.json` that training knows."""
        return {
            "test": None if self.test is None else self.test.to_json(),
            "validation": self.validation.to_json(),
            "greedy_members": sorted(self.greedy.members),
            "greedy_trials": [
                {"members": list(trial.members), "score": trial.score, "kept": trial.kept}
                for trial in self.greedy.trials
            ],
            "nonfinite": self.nonfinite,
            "repaired": None if self.repaired is None else self.repaired.to_json(),
            "aligned": None if self.aligned is None else self.aligned.to_json(),
            **({"similarity": None, "interpolation": None} if self.analysis is None else self.analysis.to_json()),
            "repair": None if self.repair is None else self.repair.to_json(),
            "trajectory": None if self.trajectory is None else self.trajectory.to_json(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def finalize(
    training: Training,
    *,
    align_soups: bool = False,
    analysis: bool = False,
    num_align_batches: int | None = 10,
    num_batch_norm_batches: int = 100,
) -> Outcome:
    """Make the soups of a trained population and score everything on validation and test data.

    Args:
        training: a training that has run.
        align_soups: where soups are repaired, also make them of members whose units were matched.
        analysis: also see what members share.
        num_align_batches: how many batches of training data units are matched on; None for all there are.
        num_batch_norm_batches: how many batches BatchNorm is re-estimated on, in averages of trajectories.
    """
    validation, test = training.data.validation, training.data.test
    wants_soups = bool(training.batches.num_repair_batches) and isinstance(training.averager.rule, Independent)
    # Before there are soups to keep: a process holds no more than two networks beside its own members.
    repaired = repaired_soups(training) if wants_soups else None
    aligned = aligned_and_repaired_soups(training, num_align_batches) if wants_soups and align_soups else None
    shared = _analysed(training, num_align_batches) if analysis else None
    trajectory = score_trajectory_averages(
        training, num_batch_norm_batches, align_soups=wants_soups and align_soups, num_align_batches=num_align_batches
    )
    average = average_soup(training.population)
    greedy = greedy_soup(training.population, lambda network: training.evaluate([network], validation)[0][0])

    def scores_on(source: Source) -> Scores:
        members, ensemble = training.evaluate_population(source)
        first, second = training.evaluate([average, greedy.network], source)[0]
        return Scores(members, ensemble, first, second, dropped=training.population.dropped)

    on_validation, on_test = scores_on(validation), None if test is None else scores_on(test)
    return Outcome(
        population=training.population,
        average_soup=average.eval(),  # as they were scored: nobody trains a soup by mistake
        greedy=replace(greedy, network=greedy.network.eval()),
        validation=on_validation,
        test=on_test,
        seconds=training.seconds,
        nonfinite=training.nonfinite,
        repaired=repaired,
        aligned=aligned,
        analysis=shared,
        repair=_repair_plan(training),
        trajectory=trajectory,
    )


def _analysed(training: Training, num_align_batches: int | None) -> Analysis | None:
    """A training that is done is not lost because its members cannot be compared."""
    try:
        return analyse(training, num_align_batches=num_align_batches)
    except PapaError as error:
        warnings.warn(f"members are not compared: {error}", stacklevel=3)
        return None


def _repair_plan(training: Training) -> RepairReport | None:
    """What REPAIR rescales, where it follows merges or makes soups of independent members."""
    batches, rule = training.batches, training.averager.rule
    is_whole = isinstance(rule, Independent) or training.merging.repair_scope != "batch-norm"
    if not batches.num_repair_batches or not rule.is_merge or not is_whole:
        return None
    return repair_plan(training.population[0], batches.plain_repair_batches(), scope=training.merging.repaired_layers)
