"""What a training ends with: the soups, and the scores of everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from papa.core.population import Population
from papa.core.soups import After, GreedySoup, average_soup, greedy_soup
from papa.evaluation.classification import Classification
from papa.evaluation.scores import Evaluation
from papa.training.callbacks import Callback, EpochRecord
from papa.training.data import Source
from papa.training.loop import Training
from papa.verdict import Verdict, spread_of, verdict


@dataclass(frozen=True)
class Scores:
    """Scores of members, ensemble and soups on one set of data."""

    members: list[Evaluation]
    ensemble: Evaluation
    average_soup: Evaluation
    greedy_soup: Evaluation
    dropped: frozenset[int] = frozenset()
    """Dropped members, which do not count."""

    @property
    def mean(self) -> float:
        """The members' mean score."""
        return sum(self.counted) / len(self.counted)

    @property
    def counted(self) -> list[float]:
        """The scores of the members that were not dropped."""
        return [found.score for member, found in enumerate(self.members) if member not in self.dropped]

    def to_json(self) -> dict[str, Any]:
        """As in `result.json`; losses have their own key."""
        return {
            "members": [member.score for member in self.members],
            "mean": self.mean,
            "min": min(self.counted),
            "max": max(self.counted),
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
        """Additional values of the metric, such as scores by class."""
        members = [member.details for member in self.members if member.details]
        if not members:
            return {}
        mean = {name: sum(member[name] for member in members) / len(members) for name in members[0]}
        others = {"ensemble": self.ensemble, "average_soup": self.average_soup, "greedy_soup": self.greedy_soup}
        return {
            "details": {"members": members, "mean": mean, **{name: value.details for name, value in others.items()}}
        }


class BestSoup(Callback):
    """Keeps the average soup of the epoch with the best validation score; ties go to the lower loss, then the earlier.

    A copy is saved with every member, so that a resumed run continues exactly on any number of processes.
    """

    def __init__(self) -> None:
        self.network: nn.Module | None = None
        """The soup; meaningful once `epoch` is above 0."""
        self._record = torch.zeros(3, dtype=torch.float64)
        """Epoch, score and loss of the soup."""

    def setup(self, training: Training) -> None:
        """Allocate the network."""
        self.network = training.current_soup()

    @property
    def epoch(self) -> int:
        """The epoch the soup is from; 0 if there is none yet."""
        return int(self._record[0])

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Keep the current soup if it is the best so far."""
        found, (epoch, score, loss) = record.validation.average_soup, self._record.tolist()
        sign = 1.0 if training.task.higher_is_better else -1.0
        if epoch == 0 or (sign * found.score, -found.loss) > (sign * score, -loss):
            self.network = training.current_soup()
            self._record = torch.tensor([record.epoch, found.score, found.loss], dtype=torch.float64)

    def member_state(self, index: int) -> dict[str, Tensor]:
        """The soup's state dict and its record."""
        assert self.network is not None
        return {"record": self._record, **{f"soup.{name}": value for name, value in self.network.state_dict().items()}}

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the soup and its record."""
        assert self.network is not None
        self._record = tensors["record"].clone()
        self.network.load_state_dict(
            {name.removeprefix("soup."): value for name, value in tensors.items() if name.startswith("soup.")}
        )


@dataclass(frozen=True)
class KeptSoup:
    """The best average soup seen while training (`Monitoring.keep_best_soup`)."""

    network: nn.Module
    """In evaluation mode."""
    epoch: int
    """The epoch it is from."""
    validation: Evaluation
    test: Evaluation | None

    def to_json(self) -> dict[str, Any]:
        """As in `result.json`."""
        scores = {"validation": self.validation, "test": self.test}
        return {
            "epoch": self.epoch,
            **{
                name: None if found is None else {"score": found.score, "loss": found.loss}
                for name, found in scores.items()
            },
        }


@dataclass(frozen=True)
class Outcome:
    """A trained population, its soups, and their scores."""

    population: Population
    """The members."""
    average_soup: nn.Module
    """The mean of all members, in evaluation mode."""
    greedy: GreedySoup[nn.Module]
    """The greedy soup on the validation data, and the trials that led to it."""
    validation: Scores
    """Scores on the validation data."""
    test: Scores | None
    """Scores on the test data, if there is any."""
    seconds: dict[str, float]
    """Seconds spent on training, averaging and evaluation."""
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    """Members that were found non-finite: when, why, and what was done."""
    best_soup: KeptSoup | None = None
    """The best average soup seen while training, if it was kept."""
    verdict: Verdict | None = None
    """Whether averaging helped, on the validation data, and what to change; None of a single network."""

    def report(self) -> str:
        """The scores of members, ensemble and soups as a small table of text."""
        columns = {"validation": self.validation, **({} if self.test is None else {"test": self.test})}
        rows = [("", *columns)]
        for member in range(len(self.validation.members)):
            rows.append((f"member {member}", *(f"{one.members[member].score:.4g}" for one in columns.values())))
        rows.append(("mean of members", *(f"{one.mean:.4g}" for one in columns.values())))
        for name in ("ensemble", "average_soup", "greedy_soup"):
            found = (f"{getattr(one, name).score:.4g}" for one in columns.values())
            rows.append((name.replace("_", " "), *found))
        if self.best_soup is not None:
            best = [self.best_soup.validation, self.best_soup.test]
            shown = (f"{one.score:.4g}" for one in best if one is not None)
            rows.append((f"best soup, of epoch {self.best_soup.epoch}", *shown))
        width = max(len(row[0]) for row in rows)
        lines = ["".join([row[0].ljust(width), *(cell.rjust(12) for cell in row[1:])]).rstrip() for row in rows]
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        lines += [f"members in the greedy soup: {sorted(self.greedy.members)}", seconds]
        return "\n".join(lines if self.verdict is None else [*lines, str(self.verdict)])

    __str__ = report

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
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "best_soup": None if self.best_soup is None else self.best_soup.to_json(),
            "nonfinite": self.nonfinite,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def finalize(training: Training) -> Outcome:
    """Make the soups of a trained population and score everything on validation and test data."""
    average, greedy = average_soup(training.population), greedy_soup_of(training)
    validation, test = scores_of(training, average, greedy.network)
    return Outcome(
        population=training.population,
        average_soup=average.eval(),  # as it was scored: nobody trains a soup by mistake
        greedy=replace(greedy, network=greedy.network.eval()),
        validation=validation,
        test=test,
        best_soup=_kept_soup(training),
        seconds=training.seconds,
        nonfinite=training.nonfinite,
        verdict=_verdict(training, validation, average),
    )


def _verdict(training: Training, scores: Scores, average: nn.Module) -> Verdict | None:
    active = training.population.active
    if len(active) < 2:
        return None
    return verdict(
        [scores.members[member] for member in active],
        scores.average_soup,
        scores.ensemble,
        spread=spread_of(training.population.distances()[list(active)], average),
        rule=training.averager.rule,
        num_steps=training.length.num_steps,
    )


def greedy_soup_of(
    training: Training, population: Population | None = None, after: After | None = None
) -> GreedySoup[nn.Module]:
    """The greedy soup of a training's members, or of another population, by scores on the validation data."""
    members = training.population if population is None else population
    return greedy_soup(members, training.score, higher_is_better=training.task.higher_is_better, after=after)


def scores_of(
    training: Training, average: nn.Module, greedy: nn.Module, population: Population | None = None
) -> tuple[Scores, Scores | None]:
    """Scores of members, ensemble and both soups on the validation data, and on the test data if there is any.

    On the validation data the losses of single examples are kept. On the test data class probabilities are also scored
    at the temperatures that suit the validation data.
    """
    population = training.population if population is None else population

    def scores_on(source: Source, known: Scores | None = None) -> Scores:
        of_members = of_soups = None
        if known is not None and isinstance(training.task.metric, Classification):
            local = [known.members[member] for member in population.members]
            of_members = [_temperature(one) for one in (*local, known.ensemble)]
            of_soups = [_temperature(known.average_soup), _temperature(known.greedy_soup), 1.0]
        keep = known is None
        members, ensemble = training.evaluate_population(source, population, temperatures=of_members, keep_losses=keep)
        first, second = training.evaluate([average, greedy], source, temperatures=of_soups, keep_losses=keep)[0]
        return Scores(members, ensemble, first, second, dropped=population.dropped)

    validation, test = scores_on(training.data.validation), training.data.test
    return validation, None if test is None else scores_on(test, validation)


def _temperature(evaluation: Evaluation) -> float:
    return (evaluation.details or {}).get("temperature", 1.0)


def _kept_soup(training: Training) -> KeptSoup | None:
    kept = next((callback for callback in training.callbacks if isinstance(callback, BestSoup)), None)
    if kept is None or kept.network is None or not kept.epoch:
        return None
    validation, source = training.score(kept.network), training.data.test
    test = None if source is None else training.score(kept.network, source)
    return KeptSoup(kept.network.eval(), kept.epoch, validation, test)
