"""Tables of results in Markdown, made from records: each function is named in a page as `{table name}`.

A score is a dotted path in a record, such as `test.average_soup` or `trajectory.test.mean`, or a function of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypeAlias

from papa.core.rules import Push
from papa.lab.config import flat
from papa.lab.report.conclusion import Difference, paired
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
    with_soups,
)
from results.record import Record

Score: TypeAlias = str | Callable[[Record], float | None]
SOUP, MEAN, ENSEMBLE = "test.average_soup", "test.mean", "test.ensemble"


def value(record: Record, of: Score) -> float | None:
    """A score of a run; None if it has none."""
    if callable(of):
        return of(record)
    found: Any = record
    for key in of.split("."):
        found = (found or {}).get(key)
    return None if found is None else float(found)


def text(records: Sequence[Record], of: Score, digits: int = 2) -> str:
    """A mean over runs, with its standard deviation if there are several; empty if there is no number."""
    return mean_text([value(record, of) for record in records], digits)


def mean_text(values: Sequence[float | None], digits: int = 2) -> str:
    """A mean with its standard deviation; empty if there is no number."""
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return "not finite" if found else ""
    mean = f"{fmean(found):.{digits}f}" if found else ""
    return f"{mean} ({stdev(found):.{digits}f})" if len(found) > 1 else mean


def of_method(records: Sequence[Record], *methods: str) -> list[Record]:
    """The runs of some methods."""
    return [record for record in records if record["method"] in methods]


def grouped(records: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Runs by a property, in the order of their first."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def less(ours: Sequence[Record], of: Score, theirs: Sequence[Record], of_theirs: Score) -> Difference | None:
    """One score minus another, seed by seed."""
    return paired(
        {record["seed"]: value(record, of) for record in ours},
        {record["seed"]: value(record, of_theirs) for record in theirs},
    )


def shows(found: Difference) -> str:
    """Whether a difference is beyond the noise of seeds, and on which side."""
    if not found.is_clear or found.mean is None:
        return "cannot be told"
    return "**shows**" if found.mean > 0 else "**the opposite shows**"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(markdown(("a", "b"), [("1", "2")]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    body = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in (head, *rows)]
    return "\n".join([body[0], "|" + "---|" * len(head), *body[1:]])


OPTIONS_IN_WORDS = {
    "average.repair 5, average.repair_policy own, average.repair_scope all": "REPAIR as in the paper",
    "average.repair 5, average.repair_policy shared, average.repair_scope all": "REPAIR on the same images for all",
    "average.repair 5, average.repair_policy own, average.repair_scope batch-norm": "BatchNorm reset alone",
    "average.repair 0, average.repair_policy own, average.repair_scope all": "no REPAIR",
    "average.every_steps 10": "a push every 10 steps",
    "average.every_steps 4": "a push every 4 steps",
}


def side_by_side(records: Sequence[Record]) -> str:
    """Means and standard deviations over seeds, the details of the metric, and every single run."""
    parts = [markdown(*compare_table(records, has_paper=False))]
    head, details = details_table(records)
    parts += [markdown(head, details)] if details else []
    runs = [(label, record) for label, group in runs_by_setting(records).items() for _, record in group]
    gaps = [gap_text(mean_gap_closed([record], records)) for _, record in runs]
    rows = [
        (
            *(label, f"{record['seed']}", *cells_of(record["test"], metric_of([record]).digits)),
            *([gap] if any(gaps) else []),
            f"{sum(record['seconds'].values()) / 60:.1f}",
        )
        for (label, record), gap in zip(runs, gaps, strict=True)
    ]
    head = ("method", "seed", *COLUMNS, *([GAP_COLUMN] if any(gaps) else []), "minutes")
    found = "\n\n".join([*parts, "Every run:", markdown(head, rows)])
    for options, words in OPTIONS_IN_WORDS.items():
        found = found.replace(options, words)
    return found


def papa(records: Sequence[Record]) -> str:
    """PAPA and independent members."""
    return side_by_side(of_method(records, "independent", "papa"))


def papa_all(records: Sequence[Record]) -> str:
    """PAPA-all, with and without REPAIR, and independent members."""
    return side_by_side(of_method(records, "independent", "papa-all"))


def difference_table(rows: Sequence[tuple[str, Difference]], digits: int = 2) -> str:
    """Differences by seed, their mean and standard deviation, and whether the mean is beyond two of these."""

    def cells(found: Difference) -> tuple[str, ...]:
        seeds = ("not finite" if one is None else f"{one:+.{digits}f}" for one in found.by_seed.values())
        if found.mean is None:
            return ", ".join(seeds), "", "", "not finite"
        if found.deviation is None:
            return ", ".join(seeds), f"{found.mean:+.{digits}f}", "", "one seed"
        verdict = "yes, above" if found.mean > 0 else "yes, below"
        verdict = verdict if abs(found.mean) > 2 * found.deviation else "no"
        return ", ".join(seeds), f"{found.mean:+.{digits}f}", f"{found.deviation:.{digits}f}", verdict

    head = ("difference", "by seed", "mean", "standard deviation", "more than two standard deviations")
    return markdown(head, [(name, *cells(found)) for name, found in rows])


def main_tables(records: Sequence[Record]) -> str:
    """Methods side by side, every run, and the gain of averaging, seed by seed."""
    return "\n\n".join([side_by_side(records), "What one averaged network gains, seed by seed:", differences(records)])


def differences(records: Sequence[Record]) -> str:
    """Each method's average soup minus scores of independent members, seed by seed.

    A repaired or aligned greedy soup that equals the plain one, because it is a single member, gets no separate row.
    """
    independent = of_method(records, "independent")
    best = "test.max" if metric_of(records).higher_is_better else "test.min"
    baselines = {
        "mean of independent members": MEAN,
        "best of independent members, by test score": best,
        "ensemble of independent members": ENSEMBLE,
        **{
            with_soups("greedy soup of independent members", soups): f"{soups + '.' if soups else ''}test.greedy_soup"
            for soups in ("", *SOUPS)
        },
    }
    rows = []
    for method in dict.fromkeys(record["method"] for record in records if record["method"] != "independent"):
        greedy: list[Difference] = []
        for name, path in baselines.items():
            found = less(of_method(records, method), SOUP, independent, path)
            if found is None or found in greedy or all(value(record, path) is None for record in independent):
                continue
            rows.append((f"{method}: average soup less {name}", found))
            greedy += [found] if "greedy" in name else []
    return difference_table(rows, metric_of(records).digits)


def against_long(records: Sequence[Record]) -> str:
    """A population compared with one network that was trained as long as all members together."""
    long = [record for record in records if record["method"] == "longer"]
    others = [record for record in records if record["method"] != "longer"]
    rows = [
        (f"{method}: average soup less one network, trained longer", difference)
        for method in dict.fromkeys(record["method"] for record in others if record["method"] != "independent")
        if (difference := less(of_method(others, method), SOUP, long, MEAN)) is not None
    ]
    return "\n\n".join([side_by_side([*others, *long]), difference_table(rows)])


def push_against_merge(records: Sequence[Record]) -> str:
    """PAPA compared with PAPA-all without REPAIR."""
    pushed = of_method(records, "papa")
    merged = [one for one in of_method(records, "papa-all") if not one["config"]["average"]["repair"]]
    found = less(pushed, SOUP, merged, SOUP)
    rows = [] if found is None else [("papa: average soup less that of papa-all", found)]
    return "\n\n".join([side_by_side([*pushed, *merged]), difference_table(rows)])


def half_lives(records: Sequence[Record]) -> str:
    """Scores for each half-life of the push and each length of training, for the seeds that all were run with."""
    records = of_method(records, "independent", "papa")
    groups = [[record for _, record in group] for group in runs_by_setting(records).values()]
    seeds = set.intersection(*({record["seed"] for record in group} for group in groups))
    records = [record for record in records if record["seed"] in seeds]

    def order(runs: Sequence[Record]) -> tuple[int, float]:
        share = runs[0]["config"]["average"]["half_life"] if runs[0]["method"] == "papa" else float("inf")
        return int(runs[0]["config"]["train"]["epochs"]), float(share)

    rows = []
    soups: dict[int, dict[float, float]] = {}
    for runs in sorted(([one for one in group if one["seed"] in seeds] for group in groups), key=order):
        (epochs, share), steps = order(runs), runs[0]["epochs"][-1]["step"]
        push = ("never pushed", "", "1")
        if runs[0]["method"] == "papa":
            every = runs[0]["config"]["average"]["every_steps"]
            alpha = Push(half_life_steps=share * steps, every_steps=every).effective_alpha
            push = (f"{share:g}", f"{share * steps:.3g}", f"{alpha:.3g}")
            soups.setdefault(epochs, {})[share] = fmean(value(run, SOUP) or 0.0 for run in runs)
        cells = (text(runs, f"test.{key}") for key in KEYS)
        rows.append((f"{epochs}", f"{steps}", *push, *cells, gap_text(mean_gap_closed(runs, records))))
    lines = []
    for epochs, found in soups.items():
        best = max(found, key=lambda share: found[share])
        end = {min(found): ", the shortest tried", max(found): ", the longest tried"}.get(best, "")
        lines.append(f"- {epochs} epochs: best average soup with a half-life of {best:g} of training{end}.")
    head = ("epochs", "steps", "half-life, share of training", "half-life, steps", "alpha at the full learning rate")
    return "\n\n".join([markdown((*head, *KEYS.values(), GAP_COLUMN), rows), "\n".join(lines)])


def rates(records: Sequence[Record]) -> str:
    """Scores of members for each learning rate: on validation data, which it is chosen by, and on test data."""
    head = ("learning rate", "mean on validation data", "mean on test data", "ensemble on test data")
    rows = [
        (f"{record['config']['train']['lr']:g}", *(text([record], of) for of in ("validation.mean", MEAN, ENSEMBLE)))
        for record in sorted(records, key=lambda record: float(record["config"]["train"]["lr"]))
    ]
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

    def options_of(record: Record) -> tuple[Any, ...]:
        options = dict(flat(record["config"]))
        return tuple(options.get(key) for key in TUNED.values())

    groups = grouped(records, options_of)
    # Runs that are older than an option do not have it.
    named = [place for place in range(len(TUNED)) if len({values[place] for values in groups} - {None}) > 1]
    rows = [
        (
            *(f"{values[place]:g}" for place in named),
            *_means(runs, "validation.mean", MEAN),
            f"{fmean(run['epochs'][-1]['loss'] for run in runs):.3f}",
        )
        for values, runs in _best_first(groups, "validation.mean")
    ]
    heads = (list(TUNED)[place] for place in named)
    return markdown((*heads, "mean on validation data", "mean on test data", "training loss at the end"), rows)


def tuned_strengths(records: Sequence[Record]) -> str:
    """Scores for each half-life of the push that was tried, best average soup on validation data first."""

    def tried(record: Record) -> str:
        same = ", the same initial weights" if record["config"]["diversity"].get("same_init") else ""
        return f"{100 * record['config']['average']['half_life']:g}%{same}"

    paths = ("validation.average_soup", "validation.mean", SOUP, MEAN)
    ordered = _best_first(grouped(records, tried), "validation.average_soup")
    heads = (f"{KEYS[path.split('.')[1]]} on {path.split('.')[0]} data" for path in paths)
    rows = [(name, *_means(runs, *paths)) for name, runs in ordered]
    return markdown(("half-life, share of training", *heads), rows)


def _best_first(groups: Mapping[Any, list[Record]], of: str) -> list[tuple[Any, list[Record]]]:
    is_higher = metric_of([runs[0] for runs in groups.values()]).higher_is_better
    return sorted(groups.items(), key=lambda one: fmean(value(run, of) or 0.0 for run in one[1]), reverse=is_higher)


def _means(runs: Sequence[Record], *paths: str) -> list[str]:
    digits = metric_of(runs).digits
    return [f"{fmean(value(run, of) or 0.0 for run in runs):.{digits}f}" for of in paths]


def alike(records: Sequence[Record]) -> str:
    """Similarity of members, and scores on the line between two of them."""
    compared = [record for record in records if record.get("interpolation")]
    rows = []
    for label, group in runs_by_setting(compared).items():
        runs = [{curve["name"]: curve for curve in record["interpolation"]["curves"]} for _, record in group]
        worst = min if metric_of(compared).higher_is_better else max
        for name in runs[0]:
            curves = [curves[name] for curves in runs if name in curves]
            scores = [curve["score"] for curve in curves]
            cells = (
                [(one[0] + one[-1]) / 2 for one in scores],
                [one[len(one) // 2] for one in scores],
                [worst(one) for one in scores],
                [curve["barrier"] for curve in curves],
            )
            rows.append((label, name, *map(mean_text, cells)))
    head = ("method", "line", "score at the ends", "score in the middle", "worst score", "loss barrier")
    between = [record["interpolation"]["curves"] for record in of_method(compared, "independent")]
    points = [
        (name, *(f"{fmean(column):.1f}" for column in zip(*scores, strict=True)))
        for name in (curve["name"] for curve in between[0])
        if (scores := [curve["score"] for curves in between for curve in curves if curve["name"] == name])
    ]
    parts = ["Cosine similarity of features, by layer:", similarity(records)]
    parts += ["On the straight line between two members, test data:", markdown(head, rows)]
    parts += ["The lines of independent members, point by point:"]
    parts += [markdown(("line", *(f"{share:g}" for share in between[0][0]["coefficients"])), points)]
    return "\n\n".join(parts)


def similarity(records: Sequence[Record]) -> str:
    """The cosine similarity of features at each layer, between two members and between a member and the soup."""
    compared = [record for record in records if record.get("similarity")]
    if not compared:
        return ""
    rows = []
    for label, group in runs_by_setting(compared).items():
        found = [record["similarity"] for _, record in group]
        for kind, words in (("members", "between two members"), ("soup", "between a member and the average soup")):
            rows.append((f"{label}, {words}", *_columns([one["plain"][kind] for one in found])))
            if all(one["matched"] for one in found):
                rows.append((f"{label}, {words}, units matched", *_columns([one[kind] for one in found])))
    return markdown(("", *compared[0]["similarity"]["layers"]), rows)


def _columns(found: Sequence[Sequence[float]]) -> list[str]:
    return [mean_text(list(column)) for column in zip(*found, strict=True)]


SAME_INIT = "papa-same-init"


def role_of(record: Record) -> str:
    """What a run is compared as: its method, `distilled` for one network with a teacher, or `papa-same-init`."""
    if record["config"]["train"].get("teacher"):
        return "distilled"
    if record["method"] == "papa" and record["config"]["diversity"].get("same_init"):
        return SAME_INIT
    return str(record["method"])
