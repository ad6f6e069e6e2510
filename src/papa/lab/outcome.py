"""What a run ends with: the outcome of its training, and the additional soups and comparisons of the paper."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from papa.align import aligned_soups
from papa.core import mixing
from papa.core.population import Population
from papa.core.soups import GreedySoup, average_soup
from papa.errors import PapaError
from papa.evaluation.scores import Evaluation
from papa.lab.analysis import Analysis, analyse, derive_symmetries
from papa.lab.config import Config
from papa.repair import RepairReport, repair_plan, repair_toward_members, reset_batch_norm_
from papa.training import Outcome, Scores, Training, TrajectoryAverage, finalize
from papa.training.data import Source
from papa.training.outcome import greedy_soup_of, scores_of


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
        found: dict[str, Any] = {"greedy_members": sorted(self.greedy_members)}
        for part, pair in (("validation", self.validation), ("test", self.test)):
            if pair is not None:
                average, greedy = pair
                found[part] = {"average_soup": average.score, "greedy_soup": greedy.score}
                if average.details:
                    found[part]["details"] = {"average_soup": average.details, "greedy_soup": greedy.details}
        return found


@dataclass(frozen=True)
class TrajectoryOutcome:
    """The scores of each member's average along its trajectory (SWA, EMA), and of soups of these."""

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
        members, score = self.greedy_without_reset
        return {
            "validation": self.validation.to_json(),
            "test": None if self.test is None else self.test.to_json(),
            "greedy_members": sorted(self.greedy_members),
            "greedy_as_it_is": {"test": None if score is None else score.score, "members": sorted(members)},
            "aligned": None if self.aligned is None else self.aligned.to_json(),
        }


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a training, with the parts that only runs of the lab have."""

    training: Outcome
    repaired: Soups | None
    """For independent members, with REPAIR: the scores of repaired soups."""
    aligned: Soups | None
    """For independent members, with alignment: the scores of aligned and repaired soups."""
    repair: RepairReport | None
    """What REPAIR does to each layer, if it is used."""
    trajectory: TrajectoryOutcome | None
    """Averages along each member's trajectory (SWA, EMA) and their soups, if there are any."""
    analysis: Analysis | None
    """How similar members are, if the config asks for it."""

    def to_json(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("repaired", "aligned", "repair", "trajectory")}
        return {
            **self.training.to_json(),
            **{name: None if part is None else part.to_json() for name, part in parts.items()},
            **({"similarity": None, "interpolation": None} if self.analysis is None else self.analysis.to_json()),
        }


def finalize_run(training: Training, config: Config) -> RunOutcome:
    """Make the soups and comparisons that a config asks for, and score everything."""
    num_align_batches = config.average.align_batches
    is_single = training.population.size == 1  # its own soup
    wants_repaired = bool(training.batches.num_repair_batches) and not training.averager.rule.averages and not is_single
    wants_aligned = wants_repaired and config.average.align_soups
    # Before there are soups to keep: a process holds at most two networks besides its members.
    repaired = _repaired_soups(training) if wants_repaired else None
    aligned = aligned_and_repaired_soups(training, num_align_batches) if wants_aligned else None
    analysis = None
    if config.analysis:
        try:
            analysis = analyse(training, num_align_batches=num_align_batches)
        except PapaError as error:  # the training is not lost
            warnings.warn(f"members are not compared: {error}", stacklevel=2)
    trajectory = _score_trajectory_averages(
        training,
        config.trajectory.batch_norm_batches,
        align_soups=wants_aligned,
        num_align_batches=num_align_batches,
    )
    return RunOutcome(finalize(training), repaired, aligned, _repair_report(training), trajectory, analysis)


def _repaired_soups(training: Training) -> Soups:
    """The average and the greedy soup, each average repaired before it is scored."""
    population, scope = training.population, training.settings.averaging.repaired_layers
    batches = training.batches.plain_repair()
    repair = repair_toward_members(population, range(population.size), batches, scope=scope)
    average = average_soup(population, after=repair)
    return _scored(training, average, greedy_soup_of(training, population, repair))


def aligned_and_repaired_soups(
    training: Training, num_align_batches: int | None = 10, population: Population | None = None
) -> Soups | None:
    """The average and the greedy soup of members that are aligned to the growing soup, best first, and repaired.

    The paper does this for VGG and ResNet-18 on CIFAR. The members are those of the training, or of another population.
    All processes must call it. None, with a warning, if the symmetries cannot be derived.
    """
    population = training.population if population is None else population
    inputs = training.batches.plain(num_align_batches)
    symmetries = derive_symmetries(population[0], inputs[0])
    if symmetries is None:
        return None
    soups = aligned_soups(
        population,
        training.score,
        inputs,
        by="activations",
        symmetries=symmetries,
        repair_batches=training.batches.plain_repair(),
        higher_is_better=training.task.higher_is_better,
    )
    return _scored(training, soups.average, soups.greedy)


def _score_trajectory_averages(
    training: Training, num_batches: int, *, align_soups: bool, num_align_batches: int | None
) -> TrajectoryOutcome | None:
    """Re-estimate BatchNorm in the averages, make soups of them, and score everything; None if there are none.

    It is re-estimated on images augmented as in training: networks know the plain ones by heart.
    """
    averages = next((callback for callback in training.callbacks if isinstance(callback, TrajectoryAverage)), None)
    if averages is None:
        return None
    population = Population(averages.networks, training.group)
    population.dropped = training.population.dropped

    def reset(network: nn.Module, row: Tensor) -> None:
        members = row.nonzero().flatten().tolist()
        reset_batch_norm_(network, training.batches.stream_augmented(members, num_batches))

    test = training.data.test
    without_reset = greedy_soup_of(training, population)
    members_without_reset = without_reset.members
    test_without_reset = None if test is None else training.score(without_reset.network, test)
    del without_reset
    for member, network in zip(population.members, population, strict=True):
        reset(network, mixing.soup_row(population.size, [member]))
    aligned = aligned_and_repaired_soups(training, num_align_batches, population) if align_soups else None
    average = average_soup(population, after=reset)
    greedy = greedy_soup_of(training, population, reset)
    on_validation, on_test = scores_of(training, average, greedy.network, population)
    without = (members_without_reset, test_without_reset)
    return TrajectoryOutcome(greedy.members, on_validation, on_test, greedy_without_reset=without, aligned=aligned)


def _scored(training: Training, average: nn.Module, greedy: GreedySoup[nn.Module]) -> Soups:
    def pair_on(source: Source) -> tuple[Evaluation, Evaluation]:
        first, second = training.evaluate([average, greedy.network], source)[0]
        return first, second

    validation, test = training.data.validation, training.data.test
    return Soups(greedy.members, greedy.score, pair_on(validation), None if test is None else pair_on(test))


def _repair_report(training: Training) -> RepairReport | None:
    """What REPAIR rescales, if it follows merges or makes soups of independent members."""
    rule, repair = training.averager.rule, training.settings.averaging.repair
    if repair is None or not repair.num_batches or not (rule.is_merge or not rule.averages):
        return None
    if rule.averages and repair.scope == "batch-norm":
        return None
    scope = training.settings.averaging.repaired_layers
    return repair_plan(training.population[0], training.batches.plain_repair(), scope=scope)
