"""The tables of `RESULTS.md`, made from records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeAlias

import scipy.stats

from papa.core.rules import Push
from papa.lab.config import flat
from papa.lab.report.metric import metric_of
from papa.lab.report.table import (
    COLUMNS,
    GAP_COLUMN,
    KEYS,
    SOUPS,
    cells_of,
    compare_table,
    details_table,
    gap_text,
    mean_gap_closed,
    runs_by_setting,
    scores_of,
    with_soups,
)

Record: TypeAlias = Mapping[str, Any]
Score: TypeAlias = Callable[[Record], float | None]
"""A number of a run, or None."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(markdown(("a", "b"), [("1", "2")]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [head, *rows]
    body = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(head), *body[1:]])


def side_by_side(records: Sequence[Record]) -> str:
    """Means and standard deviations over seeds, the details of the metric, and every single run."""
    parts = [markdown(*compare_table(records))]
    head, details = details_table(records)
    if details:
        parts.append(markdown(head, details))
    return "\n\n".join([*parts, "Every run:", every_run(records)])


def of_methods(*methods: str) -> Callable[[Sequence[Record]], str]:
    """`side_by_side` for some methods only."""
    return lambda records: side_by_side([record for record in records if record["method"] in methods])


def every_run(records: Sequence[Record]) -> str:
    """One row for each run: its scores, the gap closed if it is known, and its minutes."""
    runs = [(label, record) for label, group in runs_by_setting(records).items() for _, record in group]
    gaps = [gap_text(mean_gap_closed([record], records)) for _, record in runs]
    rows = [
        (
            label,
            f"{record['seed']}",
            *cells_of(scores_of(record), metric_of([record]).digits),
            *([gap] if any(gaps) else []),
            f"{sum(record['seconds'].values()) / 60:.1f}",
        )
        for (label, record), gap in zip(runs, gaps, strict=True)
    ]
    return markdown(("method", "seed", *COLUMNS, *([GAP_COLUMN] if any(gaps) else []), "minutes"), rows)


def renamed(render: Callable[[Sequence[Record]], str], words: Mapping[str, str]) -> Callable[[Sequence[Record]], str]:
    """`render` with plain words in place of option names."""

    def render_renamed(records: Sequence[Record]) -> str:
        text = render(records)
        for option, word in words.items():
            text = text.replace(option, word)
        return text

    return render_renamed


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
        return None if self.values is None else fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return stdev(self.values) if self.values is not None and len(self.values) > 1 else None

    @property
    def verdict(self) -> str:
        """Whether the mean is more than two standard deviations from zero, and on which side."""
        if self.mean is None or self.deviation is None:
            return "not finite" if self.mean is None else "one seed"
        if abs(self.mean) <= 2 * self.deviation:
            return "no"
        return "yes, above" if self.mean > 0 else "yes, below"


def shows(found: Difference) -> str:
    """Whether zero is outside the 95% interval of the mean over seeds (Student's t), and on which side."""
    if found.mean is None or found.deviation is None or found.values is None:
        return "cannot be told"
    count = len(found.values)
    margin = float(scipy.stats.t.ppf(0.975, count - 1)) * found.deviation / math.sqrt(count)
    if abs(found.mean) <= margin:
        return "cannot be told"
    return "**shows**" if found.mean > 0 else "**the opposite shows**"


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


def score(key: str, soups: str | None = None) -> Score:
    """A function that finds the test score under a key, of plain or of other soups."""

    def find(record: Record) -> float | None:
        own = record if soups is None else record.get(soups)
        return None if own is None else scores_of(own).get(key)

    return find


def by_seed(records: Sequence[Record], of: Score) -> dict[int, float | None]:
    """A score of some runs, by seed."""
    return {record["seed"]: of(record) for record in records}


BASELINES: dict[str, Score] = {
    "mean of independent members": score("mean"),
    "best of independent members, by test score": lambda record: score(_best(record))(record),
    "ensemble of independent members": score("ensemble"),
    **{
        f"{with_soups('greedy soup of independent members', soups)}": score("greedy_soup", soups)
        for soups in (None, *SOUPS)
    },
}
"""The scores of independent members that an average soup is compared with."""


def differences(records: Sequence[Record]) -> str:
    """Each method's average soup minus scores of independent members, seed by seed.

    A repaired or aligned greedy soup that equals the plain one, because it is a single member, gets no separate row.
    """
    independent = _of_method(records, "independent")
    rows = []
    for method in dict.fromkeys(record["method"] for record in records if record["method"] != "independent"):
        greedy: list[Difference] = []
        for name, baseline in BASELINES.items():
            if all(baseline(record) is None for record in independent):
                continue  # soups that were not made
            difference = _difference(_of_method(records, method), independent, baseline)
            if difference is None or difference in greedy:
                continue
            rows.append((f"{method}: average soup less {name}", difference))
            greedy += [difference] if "greedy" in name else []
    return difference_table(rows, metric_of(records).digits)


def difference_table(rows: Sequence[tuple[str, Difference]], digits: int = 2) -> str:
    """Differences by seed, their mean and standard deviation, and whether the mean is beyond two of these."""
    head = ("difference", "by seed", "mean", "standard deviation", "more than two standard deviations")
    return markdown(
        head,
        [
            (
                name,
                ", ".join(
                    "not finite" if value is None else f"{value:+.{digits}f}" for value in found.by_seed.values()
                ),
                "" if found.mean is None else f"{found.mean:+.{digits}f}",
                "" if found.deviation is None else f"{found.deviation:.{digits}f}",
                found.verdict,
            )
            for name, found in rows
        ],
    )


def main_tables(records: Sequence[Record]) -> str:
    """Methods side by side, every run, and the gain of averaging, seed by seed."""
    return "\n\n".join([side_by_side(records), "What one averaged network gains, seed by seed:", differences(records)])


def against_long(records: Sequence[Record]) -> str:
    """A population compared with one network that was trained as long as all members together."""
    long = _of_method(records, "longer")
    others = [record for record in records if record["method"] != "longer"]
    rows = [
        (f"{method}: average soup less one network, trained longer", difference)
        for method in dict.fromkeys(record["method"] for record in others if record["method"] != "independent")
        if (difference := _difference(_of_method(others, method), long, score("mean"))) is not None
    ]
    return "\n\n".join([side_by_side([*others, *long]), difference_table(rows)])


def push_against_merge(records: Sequence[Record]) -> str:
    """PAPA compared with PAPA-all without REPAIR."""
    pushed = _of_method(records, "papa")
    merged = [one for one in _of_method(records, "papa-all") if not one["config"]["average"]["repair"]]
    difference = _difference(pushed, merged, score("average_soup"))
    rows = [] if difference is None else [("papa: average soup less that of papa-all", difference)]
    return "\n\n".join([side_by_side([*pushed, *merged]), difference_table(rows)])


def half_lives(records: Sequence[Record]) -> str:
    """Scores for each half-life of the push and each length of training, for the same seeds."""
    records = of_common_seeds([record for record in records if record["method"] in ("independent", "papa")])
    rows = []
    groups = [[record for _, record in group] for group in runs_by_setting(records).values()]
    for runs in sorted(groups, key=lambda runs: (_length(runs[0]), _share(runs[0]))):
        epochs, share = _length(runs[0]), _share(runs[0])
        steps = runs[0]["epochs"][-1]["step"]
        every = runs[0]["config"]["average"]["every_steps"]
        push = ("never pushed", "", "1")
        if runs[0]["method"] == "papa":
            push = (f"{share:g}", f"{share * steps:.3g}", f"{_alpha(share * steps, every):.3g}")
        gap = mean_gap_closed(runs, records)
        cells = (mean_text([score(key)(run) for run in runs]) for key in KEYS)
        rows.append((f"{epochs}", f"{steps}", *push, *cells, gap_text(gap)))
    head = ("epochs", "steps", "half-life, share of training", "half-life, steps", "alpha at the full learning rate")
    return "\n\n".join([markdown((*head, *KEYS.values(), GAP_COLUMN), rows), *_best_shares(records)])


def rates(records: Sequence[Record]) -> str:
    """Scores of members for each learning rate: on validation data, which it is chosen by, and on test data."""
    head = ("learning rate", "mean on validation data", "mean on test data", "ensemble on test data")
    rows = []
    for record in sorted(records, key=lambda record: float(record["config"]["train"]["lr"])):
        validation, test = record["validation"], record["test"]
        cells = (validation["mean"], test["mean"], test["ensemble"])
        rows.append((f"{record['config']['train']['lr']:g}", *(mean_text([value]) for value in cells)))
    return markdown(head, rows)


TUNED = {
    "learning rate": "train.lr",
    "weight decay": "train.weight_decay",
    "dropout": "model.dropout",
    "transformer's dropout": "gpt.dropout",
}
"""Options that are tuned for single networks, in words; a table has those that differ."""


def tuned_options(records: Sequence[Record]) -> str:
    """Scores of members for each setting of the options that were tried, best on validation data first."""
    metric = metric_of(records)
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        options = dict(flat(record["config"]))
        groups.setdefault(tuple(options.get(key) for key in TUNED.values()), []).append(record)
    # Runs that are older than an option do not have it.
    named = [place for place in range(len(TUNED)) if len({values[place] for values in groups} - {None}) > 1]

    def mean(runs: Sequence[Record], part: str) -> float:
        return fmean(run[part]["mean"] for run in runs)

    ordered = sorted(groups.items(), key=lambda group: mean(group[1], "validation"), reverse=metric.higher_is_better)
    rows = [
        (
            *(f"{values[place]:g}" for place in named),
            *(f"{mean(runs, part):.{metric.digits}f}" for part in ("validation", "test")),
            f"{fmean(run['epochs'][-1]['loss'] for run in runs):.3f}",
        )
        for values, runs in ordered
    ]
    heads = (list(TUNED)[place] for place in named)
    return markdown((*heads, "mean on validation data", "mean on test data", "training loss at the end"), rows)


def tuned_strengths(records: Sequence[Record]) -> str:
    """Scores for each half-life of the push that was tried, best average soup on validation data first."""
    metric = metric_of(records)
    groups: dict[str, list[Record]] = {}
    for record in records:
        same = ", the same initial weights" if record["config"]["diversity"].get("same_init") else ""
        groups.setdefault(f"{100 * _share(record):g}%{same}", []).append(record)

    def mean(runs: Sequence[Record], part: str, key: str) -> float:
        return fmean(run[part][key] for run in runs)

    ordered = sorted(
        groups.items(), key=lambda one: mean(one[1], "validation", "average_soup"), reverse=metric.higher_is_better
    )
    columns = (("validation", "average_soup"), ("validation", "mean"), ("test", "average_soup"), ("test", "mean"))
    rows = [(tried, *(f"{mean(runs, *column):.{metric.digits}f}" for column in columns)) for tried, runs in ordered]
    heads = (f"{KEYS[key]} on {part} data" for part, key in columns)
    return markdown(("half-life, share of training", *heads), rows)


def of_common_seeds(records: Sequence[Record]) -> list[Record]:
    """The runs with a seed that all settings among them have."""
    seeds = [{record["seed"] for _, record in group} for group in runs_by_setting(records).values()]
    return [record for record in records if all(record["seed"] in some for some in seeds)]


def _best_shares(records: Sequence[Record]) -> list[str]:
    """The half-life of the best average soup, for each length of training."""
    lines = []
    pushed = [record for record in records if record["method"] == "papa"]
    for epochs in sorted({_length(record) for record in pushed}):
        soups: dict[float, list[float]] = {}
        for record in pushed:
            if _length(record) == epochs and (value := score("average_soup")(record)) is not None:
                soups.setdefault(_share(record), []).append(value)
        choose = max if metric_of(pushed).higher_is_better else min
        best = choose(soups, key=lambda share: fmean(soups[share]))
        end = {min(soups): ", the shortest tried", max(soups): ", the longest tried"}.get(best, "")
        lines.append(f"- {epochs} epochs: best average soup with a half-life of {best:g} of training{end}.")
    return ["\n".join(lines)] if lines else []


def similarity(records: Sequence[Record]) -> str:
    """The cosine similarity of features at each layer, between two members and between a member and the soup."""
    compared = [record for record in records if record.get("similarity")]
    if not compared:
        return ""
    layers = compared[0]["similarity"]["layers"]
    rows = []
    for label, group in runs_by_setting(compared).items():
        found = [record["similarity"] for _, record in group]
        for kind, words in (("members", "between two members"), ("soup", "between a member and the average soup")):
            rows.append((f"{label}, {words}", *_columns([one["plain"][kind] for one in found])))
            if all(one["matched"] for one in found):
                rows.append((f"{label}, {words}, units matched", *_columns([one[kind] for one in found])))
    return markdown(("", *layers), rows)


def lines_between(records: Sequence[Record]) -> str:
    """Scores on the straight line between two members: plain, aligned, repaired and both."""
    rows = []
    compared = [record for record in records if record.get("interpolation")]
    for label, group in runs_by_setting(compared).items():
        runs = [{curve["name"]: curve for curve in record["interpolation"]["curves"]} for _, record in group]
        for name in runs[0]:
            curves = [curves[name] for curves in runs if name in curves]
            ends = mean_text([(curve["score"][0] + curve["score"][-1]) / 2 for curve in curves])
            middle = mean_text([curve["score"][len(curve["score"]) // 2] for curve in curves])
            worst = mean_text([(min if _best(group[0][1]) == "max" else max)(curve["score"]) for curve in curves])
            rows.append((label, name, ends, middle, worst, mean_text([curve["barrier"] for curve in curves])))
    head = ("method", "line", "score at the ends", "score in the middle", "worst score", "loss barrier")
    return markdown(head, rows) if rows else ""


def alike(records: Sequence[Record]) -> str:
    """Similarity of members, and scores on the line between two of them."""
    parts = ["Cosine similarity of features, by layer:", similarity(records)]
    parts += ["On the straight line between two members, test data:", lines_between(records)]
    return "\n\n".join([*parts, "The lines of independent members, point by point:", points_between(records)])


def points_between(records: Sequence[Record]) -> str:
    """The mean score at every point of the lines between two independent members."""
    compared = [record["interpolation"]["curves"] for record in _of_method(records, "independent")]
    names = [curve["name"] for curve in compared[0]]
    rows = [
        (name, *(f"{fmean(column):.1f}" for column in zip(*scores, strict=True)))
        for name in names
        if (scores := [curve["score"] for curves in compared for curve in curves if curve["name"] == name])
    ]
    return markdown(("line", *(f"{share:g}" for share in compared[0][0]["coefficients"])), rows)


def headline(records: Sequence[Record], longer: Sequence[Record]) -> str:
    """The README's table: what one network, several networks and a soup reach on the same data.

    Args:
        records: the populations of the main study.
        longer: single networks with as many steps as a population has in all.
    """
    independent, papa = _of_method(records, "independent"), _of_method(records, "papa")
    members = str(records[0]["config"]["members"])
    times = round(_length(longer[0]) / _length(papa[0])) if longer else 0
    rows: list[tuple[str, str, Sequence[Record], Score]] = [
        (f"one network (mean of {members})", "1", independent, score("mean")),
        ("... with weights averaged over time (EMA)", "1", independent, along_trajectory("mean")),
        ("greedy soup of independent networks", "1", independent, score("greedy_soup")),
        (f"one network trained {times} times longer", "1", longer, score("mean")),
        ("... with EMA", "1", longer, along_trajectory("mean")),
        ("**PAPA, average soup**", "**1**", papa, score("average_soup")),
        ("**PAPA with EMA, average soup**", "**1**", papa, along_trajectory("average_soup")),
        ("ensemble of independent networks", members, independent, score("ensemble")),
    ]
    cells = [
        (label, networks, f"**{text}**" if label.startswith("**") else text)
        for label, networks, runs, of in rows
        if (text := mean_text([of(run) for run in runs]))
    ]
    return markdown(("", "networks at inference", "test accuracy, %"), cells)


def along_trajectory(key: str) -> Score:
    """A function that finds the test score of averages along trajectories (EMA)."""

    def find(record: Record) -> float | None:
        found: Mapping[str, Any] | None = (record.get("trajectory") or {}).get("test")
        return None if found is None else found.get(key)

    return find


def prose_number(records: Sequence[Record], key: str) -> str:
    """A number for a sentence: the mean of a test score over runs, with its standard deviation if there are several.

    Args:
        records: runs that differ in nothing but the seed.
        key: `average_soup`, or with the kind of soups before it, `aligned.greedy_soup`.
    """
    soups, dot, name = key.rpartition(".")
    return mean_text([score(name, soups if dot else None)(record) for record in records], metric_of(records).digits)


def _of_method(records: Sequence[Record], method: str) -> list[Record]:
    return [record for record in records if record["method"] == method]


def _difference(ours: Sequence[Record], theirs: Sequence[Record], baseline: Score) -> Difference | None:
    return paired(by_seed(ours, score("average_soup")), by_seed(theirs, baseline))


def _best(record: Record) -> str:
    """The key of the best member's score."""
    return "max" if metric_of([record]).higher_is_better else "min"


def _length(record: Record) -> int:
    return int(record["config"]["train"]["epochs"])


def _share(record: Record) -> float:
    """The half-life as a share of training; infinite if members are never pushed."""
    return float("inf") if record["method"] == "independent" else float(record["config"]["average"]["half_life"])


def _alpha(half_life: float, every_steps: int) -> float:
    return Push(half_life_steps=half_life, every_steps=every_steps).effective_alpha


def _columns(found: Sequence[Sequence[float]]) -> list[str]:
    return [mean_text(list(column)) for column in zip(*found, strict=True)]


def mean_text(values: Sequence[float | None], digits: int = 2) -> str:
    """A mean with its standard deviation; empty if there is no number."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    if len(found) < len(values):
        return "not finite"
    mean = f"{fmean(found):.{digits}f}"
    return f"{mean} ({stdev(found):.{digits}f})" if len(found) > 1 else mean
