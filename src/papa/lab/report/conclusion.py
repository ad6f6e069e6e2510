"""What the reader of a report should conclude, and whether it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeAlias

import scipy.stats

from papa.lab.report.metric import Metric, metric_of
from papa.lab.report.table import (
    data_of,
    independent_counterpart,
    is_independent,
    runs_by_setting,
    scores_of,
)

Result: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """One score minus another, by seed; None if either is not finite."""

    by_seed: Mapping[int, float | None]

    @property
    def values(self) -> list[float] | None:
        """One value for each seed; None if any is missing, since a mean over the others would be biased."""
        found = [value for value in self.by_seed.values() if value is not None]
        return found if len(found) == len(self.by_seed) else None

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return stdev(self.values) if self.values is not None and len(self.values) > 1 else None

    @property
    def is_clear(self) -> bool:
        """Whether zero is outside the 95% interval of the mean over seeds (Student's t); never with one seed.

        Example:
            >>> Difference({1: 0.9, 2: 1.1, 3: 1.0}).is_clear, Difference({1: 2.0, 2: -1.0}).is_clear
            (True, False)
        """
        if self.values is None or self.mean is None or self.deviation is None:
            return False
        count = len(self.values)
        return abs(self.mean) > float(scipy.stats.t.ppf(0.975, count - 1)) * self.deviation / math.sqrt(count)


def paired(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Difference | None:
    """Ours minus theirs for every seed that both have; None if there is none.

    Example:
        >>> paired({1: 55.0, 2: 56.0, 3: 57.0}, {1: 50.0, 2: None}).by_seed
        {1: 5.0, 2: None}
    """
    found: dict[int, float | None] = {}
    for seed in (seed for seed in ours if seed in theirs):
        one, other = ours[seed], theirs[seed]
        found[seed] = None if one is None or other is None else one - other
    return Difference(found) if found else None


def conclusion(results: Sequence[Result]) -> str:
    """What some runs show: whether the best average soup is better than one network alone, and how sure that is.

    Seeds are compared in pairs. Empty if there is no average soup of a population.
    """
    settings, metric = runs_by_setting(results), metric_of(results)
    populations = {
        label: runs
        for label, group in settings.items()
        if (runs := [run for _, run in group if scores_of(run).get("average_soup") is not None])
        and any(len(scores_of(run).get("members", ())) > 1 for run in runs)
    }
    averaged = {label: runs for label, runs in populations.items() if not is_independent([(0, runs[0])])}
    if not (averaged or populations):
        return ""
    means = {label: fmean(_scores(runs, "average_soup")) for label, runs in (averaged or populations).items()}
    best = (max if metric.higher_is_better else min)(means, key=lambda label: means[label])
    runs = populations[best]
    soup = f"{_spread_text(_scores(runs, 'average_soup'), metric)} {metric.name} on {data_of(runs)} data"
    soups = {run["seed"]: scores_of(run)["average_soup"] for run in runs}
    against = {run["seed"]: independent_counterpart(run, results) if averaged else run for run in runs}
    has_own = not averaged or not all(against.values())
    others = {run["seed"]: run for run in runs} if has_own else against

    def less(key: str) -> Difference | None:
        theirs = {seed: scores_of(other).get(key) for seed, other in others.items()}
        return paired(soups, theirs)

    gain = less("mean")
    if gain is None or gain.mean is None:
        return f"The average soup of {best}, one network, has {soup}."
    alone = "one of its own members" if has_own else "one independent network"
    rest = f"{_words(gain, metric, 'as good as', ' than')} {alone}"
    count = len(gain.by_seed)
    is_gain = gain.mean > 0 if metric.higher_is_better else gain.mean < 0
    if count == 1:
        first = f"The average soup of {best}, one network, has {soup}, {rest}; one seed cannot tell that from noise."
    elif not gain.is_clear:
        first = (
            f"No gain can be told from noise: the best average soup, of {best}, has {soup}, {rest}, "
            f"which is within the noise of {count} seeds."
        )
    elif is_gain:
        first = f"{best} gives a better network than {alone}: its average soup has {soup}, {rest} ({count} seeds)."
    else:
        first = f"Averaging does not pay here: the best average soup, of {best}, has {soup}, {rest} ({count} seeds)."
    networks = f"{len(scores_of(runs[0]).get('members', ()))} {'of the same' if has_own else 'independent'} networks"
    ensembles = _scores(others.values(), "ensemble")
    longer = [run for run in results if run.get("method") == "longer" and scores_of(run)]
    from_longer = paired(soups, {run["seed"]: scores_of(run).get("mean") for run in longer})
    parts = [
        first,
        _sentence(f"The ensemble of {networks}", ensembles, less("ensemble"), metric),
        _sentence("One network that trained longer", _scores(longer, "mean"), from_longer, metric),
    ]
    if has_own and averaged and len(settings) > 1:
        parts.append("There are no independent members here to compare with.")
    return " ".join(filter(None, parts))


def _scores(runs: Any, key: str) -> list[float]:
    return [value for run in runs if (value := scores_of(run).get(key)) is not None]


def _sentence(who: str, scores: Sequence[float], soup_less: Difference | None, metric: Metric) -> str:
    """What others have, seen from the average soup."""
    if soup_less is None or soup_less.mean is None:
        return ""
    theirs = Difference({seed: None if value is None else -value for seed, value in soup_less.by_seed.items()})
    noise = ", within the noise" if len(theirs.by_seed) > 1 and not theirs.is_clear else ""
    return f"{who} has {_spread_text(scores, metric)}, {_words(theirs, metric, 'no difference')}{noise}."


def _words(difference: Difference, metric: Metric, equal: str, end: str = "") -> str:
    """A difference, such as `2.5 ± 0.3 points better`, or the words for none."""
    mean, digits = difference.mean or 0.0, metric.digits - 1
    if difference.deviation is None and float(f"{mean:.{digits}f}") == 0.0:
        return equal
    spread = "" if difference.deviation is None else f" ± {difference.deviation:.{digits}f}"
    unit = " points" if metric.unit == "%" else ""
    side = "better" if (mean > 0) == metric.higher_is_better else "worse"
    return f"{abs(mean):.{digits}f}{spread}{unit} {side}{end}"


def _spread_text(values: Sequence[float], metric: Metric) -> str:
    spread = f" ± {stdev(values):.{metric.digits - 1}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{metric.digits - 1}f}{spread}{metric.unit}"
