"""What a training ends with: the soups, and how good everything is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from papa.data.source import Source
from papa.evaluate import Evaluation
from papa.population import Population
from papa.repair import RepairReport, goals_of, layer_moments, repair_plan, repair_toward_
from papa.rules import Independent
from papa.soup import GreedySoup, average_soup, greedy_soup
from papa.training.loop import Training


@dataclass(frozen=True)
class Scores:
    """How good members, ensemble and soups are on one set of data."""

    members: list[Evaluation]
    ensemble: Evaluation
    average_soup: Evaluation
    greedy_soup: Evaluation
    dropped: frozenset[int] = frozenset()
    """Members that do not count."""

    @property
    def mean(self) -> float:
        """The members' mean score."""
        return sum(self._counted) / len(self._counted)

    @property
    def _counted(self) -> list[float]:
        return [found.score for member, found in enumerate(self.members) if member not in self.dropped]

    def to_json(self) -> dict[str, Any]:
        """Scores as `result.json` holds them, losses under a key of their own."""
        return {
            "members": [member.score for member in self.members],
            "mean": self.mean,
            "min": min(self._counted),
            "max": max(self._counted),
            "ensemble": self.ensemble.score,
            "average_soup": self.average_soup.score,
            "greedy_soup": self.greedy_soup.score,
            "loss": {
                "members": [member.loss for member in self.members],
                "ensemble": self.ensemble.loss,
                "average_soup": self.average_soup.loss,
                "greedy_soup": self.greedy_soup.loss,
            },
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """What else the metric tells, such as scores by class, of members, their mean, ensemble and soups."""
        members = [member.details for member in self.members if member.details]
        if not members:
            return {}
        mean = {name: sum(member[name] for member in members) / len(members) for name in members[0]}
        others = {"ensemble": self.ensemble, "average_soup": self.average_soup, "greedy_soup": self.greedy_soup}
        return {
            "details": {"members": members, "mean": mean, **{name: value.details for name, value in others.items()}}
        }


@dataclass(frozen=True)
class RepairedSoups:
    """Soups whose activation statistics were repaired (REPAIR), and their scores."""

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
    sick: list[dict[str, Any]] = field(default_factory=list)
    """Members that were found sick, when, why, and what was done."""
    repaired: RepairedSoups | None = None
    """For members that were never averaged, and where REPAIR is asked for: the soups it gives."""
    repair: RepairReport | None = None
    """Where REPAIR was used: what it does to each layer."""

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
            "sick": self.sick,
            "repaired": None if self.repaired is None else self.repaired.to_json(),
            "repair": None if self.repair is None else self.repair.to_json(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def harvest(training: Training) -> Outcome:
    """Make the soups of a trained population and score everything on validation and test data."""
    validation, test = training.data.validation, training.data.test
    average = average_soup(training.population)
    greedy = greedy_soup(training.population, lambda network: training.evaluate([network], validation)[0][0])

    def scores_on(source: Source) -> Scores:
        members, ensemble = training.evaluate_population(source)
        first, second = training.evaluate([average, greedy.network], source)[0]
        return Scores(members, ensemble, first, second, dropped=training.population.dropped)

    return Outcome(
        population=training.population,
        average_soup=average,
        greedy=greedy,
        validation=scores_on(validation),
        test=None if test is None else scores_on(test),
        seconds=training.seconds,
        sick=training.sick,
        repaired=repaired_soups(training) if _wants_repaired_soups(training) else None,
        repair=repair_plan(training.population[0], training.plain_repair_batches()) if _uses_repair(training) else None,
    )


def _uses_repair(training: Training) -> bool:
    return (
        bool(training.num_repair_batches) and training.averager.rule.is_merge and not training.merging.batch_norm_only
    )


def _wants_repaired_soups(training: Training) -> bool:
    return bool(training.num_repair_batches) and isinstance(training.averager.rule, Independent)


def repaired_soups(training: Training) -> RepairedSoups:
    """Average and greedy soup, each average repaired before it is scored, as the paper does for independent members."""
    batches = training.plain_repair_batches()
    moments = training.group.gather([layer_moments(model, batches) for model in training.population])

    def repair(network: nn.Module, row: Tensor) -> None:
        repair_toward_(network, goals_of(moments, row), batches)

    def pair_on(source: Source) -> tuple[Evaluation, Evaluation]:
        first, second = training.evaluate([average, greedy.network], source)[0]
        return first, second

    validation, test = training.data.validation, training.data.test
    average = average_soup(training.population, after=repair)
    greedy = greedy_soup(
        training.population, lambda network: training.evaluate([network], validation)[0][0], after=repair
    )
    return RepairedSoups(average, greedy, pair_on(validation), None if test is None else pair_on(test))
