"""What a training ends with: the soups, and how good everything is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from papa.data.source import Source
from papa.evaluate import Evaluation
from papa.population import Population
from papa.soup import GreedySoup, average_soup, greedy_soup
from papa.training.loop import Training


@dataclass(frozen=True)
class Scores:
    """How good members, ensemble and soups are on one set of data."""

    members: list[Evaluation]
    ensemble: Evaluation
    average_soup: Evaluation
    greedy_soup: Evaluation

    @property
    def mean(self) -> float:
        """The members' mean score."""
        return sum(member.score for member in self.members) / len(self.members)

    def to_json(self) -> dict[str, Any]:
        """Scores as `result.json` holds them, losses under a key of their own."""
        scores = [member.score for member in self.members]
        return {
            "members": scores,
            "mean": self.mean,
            "min": min(scores),
            "max": max(scores),
            "ensemble": self.ensemble.score,
            "average_soup": self.average_soup.score,
            "greedy_soup": self.greedy_soup.score,
            "loss": {
                "members": [member.loss for member in self.members],
                "ensemble": self.ensemble.loss,
                "average_soup": self.average_soup.loss,
                "greedy_soup": self.greedy_soup.loss,
            },
        }


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
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def harvest(training: Training) -> Outcome:
    """Make the soups of a trained population and score everything on validation and test data."""
    validation, test = training.data.validation, training.data.test
    average = average_soup(training.population)
    greedy = greedy_soup(training.population, lambda network: training.evaluate([network], validation)[0][0])

    def scores_on(source: Source) -> Scores:
        members, ensemble = training.evaluate_population(source)
        soups, _ = training.evaluate([average, greedy.network], source)
        return Scores(members, ensemble, *soups)

    return Outcome(
        population=training.population,
        average_soup=average,
        greedy=greedy,
        validation=scores_on(validation),
        test=None if test is None else scores_on(test),
        seconds=training.seconds,
    )
