"""The evidence where data runs out: PAPA beside all else that the same compute can buy, the paper's claims, and where
averaging stops paying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from papa.lab.report.conclusion import Difference
from papa.lab.report.draw import SERIES_COLORS, Chart, Line, Point, line_chart
from papa.lab.report.metric import metric_of
from papa.lab.report.table import gap_text, mean_gap_closed
from results.record import Record
from results.tables import (
    ENSEMBLE,
    MEAN,
    SAME_INIT,
    SOUP,
    Score,
    difference_table,
    grouped,
    less,
    markdown,
    mean_text,
    role_of,
    shows,
    side_by_side,
    similarity,
    text,
    value,
)

EMA_SOUP, EMA_MEAN = "trajectory.test.average_soup", "trajectory.test.mean"


def best_by_validation(record: Record) -> float | None:
    """The test score of the member that is best on validation data; of equal ones the first."""
    found = [one for one in record["validation"]["members"] if one is not None]
    if not found:
        return None
    best = (max if metric_of([record]).higher_is_better else min)(found)
    score: float | None = record["test"]["members"][record["validation"]["members"].index(best)]
    return score


CONTROLS: tuple[tuple[str, str, Score], ...] = (
    ("one network (mean of p)", "independent", MEAN),
    ("... with EMA (mean of p)", "independent", EMA_MEAN),
    ("the best of p by validation", "independent", best_by_validation),
    ("greedy soup of p independent networks", "independent", "test.greedy_soup"),
    ("one network, p times longer", "longer", MEAN),
    ("... with early stopping", "longer", "best_soup.test.score"),
    ("... with EMA", "longer", EMA_MEAN),
    ("one network, distilled from the ensemble of p", "distilled", MEAN),
    ("one network, batches p times larger", "larger-batches", MEAN),
    ("PAPA-2, average soup", "papa-2", SOUP),
    ("PAPA-all, average soup", "papa-all", SOUP),
    ("**PAPA, average soup**", "papa", SOUP),
    ("PAPA with EMA, average soup", "papa", EMA_SOUP),
    ("PAPA, same initial weights, average soup", SAME_INIT, SOUP),
    ("... with EMA, average soup", SAME_INIT, EMA_SOUP),
    ("ensemble of p networks, all at inference", "independent", ENSEMBLE),
)
"""A label, the role of the runs, and their score."""
OURS = {"PAPA": SOUP, "PAPA with EMA": EMA_SOUP}
"""The soups that controls are compared with."""


def evidence(records: Sequence[Record]) -> str:
    """The controls, the differences by seed, and methods side by side."""
    roles = grouped(records, role_of)
    rows = []
    for name, of in OURS.items():
        for label, role, score in CONTROLS:
            found = less(roles.get("papa", []), of, roles.get(role, []), score)
            if found is not None and role != "papa":
                rows.append((f"{name} less {label}", found))
    verdicts = difference_table(rows, metric_of(records).digits)
    return "\n\n".join([controls(records), verdicts, side_by_side(records)])


def controls(records: Sequence[Record], soups: Sequence[str] = tuple(OURS)) -> str:
    """One row for each control: its test score, and `soups` of PAPA minus it."""
    roles = grouped(records, role_of)
    metric, size = metric_of(records), str(max(record["config"]["members"] for record in records))
    papa = roles.get("papa", [])
    names = [name for name in soups if any(value(record, OURS[name]) is not None for record in papa)]
    rows = []
    for label, role, score in CONTROLS:
        runs = roles.get(role, [])
        if any(value(record, score) is not None for record in runs):
            words = label.replace("of p", f"of {size}").replace("p times", f"{size} times")
            cells = [words, text(runs, score, metric.digits)]
            for name in names:
                found = less(papa, OURS[name], runs, score)
                is_own = label.strip("*") == f"{name}, average soup"
                mean, spread = (None, None) if found is None or is_own else (found.mean, found.deviation)
                deviation = "" if spread is None else f" ({spread:.{metric.digits}f})"
                cells.append("" if mean is None else f"{mean:+.{metric.digits}f}{deviation}")
            rows.append(cells)
    return markdown(("", f"test {metric.name}", *(f"{name} less this" for name in names)), rows) + _closed(roles)


def _closed(roles: Mapping[str, list[Record]]) -> str:
    """A sentence on the gap between one network and the ensemble; empty where it is lost in the noise of seeds."""
    alone = roles.get("independent", [])
    gap = less(alone, ENSEMBLE, alone, MEAN)
    if gap is None or gap.mean is None or abs(gap.mean) <= (gap.deviation or 0.0):
        return ""

    def share(role: str, soups: str | None = None) -> str:
        # Independent members, whose initial weights always differ, are the yardstick of all.
        apart = {"same_init": False}
        runs = [
            {**run, "config": {**run["config"], "diversity": {**run["config"]["diversity"], **apart}}}
            for run in roles.get(role, [])
        ]
        return gap_text(mean_gap_closed(runs, [*alone, *runs], soups))

    if not share("papa") or share("papa").startswith("below"):
        return ""
    with_ema = f", with EMA {found}" if (found := share("papa", "trajectory")) else ""
    others = [share(SAME_INIT), share(SAME_INIT, "trajectory")]
    same = f"; from the same initial weights {others[0]}, with EMA {others[1]}" if all(others) else ""
    return f"\n\nPAPA closes {share('papa')} of the gap to the ensemble{with_ema}{same}."


def headline(records: Sequence[Record], longer: Sequence[Record]) -> str:
    """The README's table: what one network, several networks and a soup reach on the same data.

    Args:
        records: the populations of the main study.
        longer: single networks with as many steps as a population has in all.
    """
    roles = grouped(records, role_of)
    independent, papa = roles["independent"], roles["papa"]
    members = str(records[0]["config"]["members"])
    times = round(longer[0]["config"]["train"]["epochs"] / papa[0]["config"]["train"]["epochs"]) if longer else 0
    rows: list[tuple[str, str, Sequence[Record], Score]] = [
        (f"one network (mean of {members})", "1", independent, MEAN),
        ("... with weights averaged over time (EMA)", "1", independent, EMA_MEAN),
        ("greedy soup of independent networks", "1", independent, "test.greedy_soup"),
        (f"one network trained {times} times longer", "1", longer, MEAN),
        ("... with EMA", "1", longer, EMA_MEAN),
        ("**PAPA, average soup**", "**1**", papa, SOUP),
        ("**PAPA with EMA, average soup**", "**1**", papa, EMA_SOUP),
        ("ensemble of independent networks", members, independent, ENSEMBLE),
    ]
    cells = [
        (label, networks, f"**{found}**" if label.startswith("**") else found)
        for label, networks, runs, of in rows
        if (found := text(runs, of))
    ]
    return markdown(("", "networks at inference", "test accuracy, %"), cells)


OWN, CLAIMS_FOLDER = "small/digits-150/", "small/claims/"


class Claim(NamedTuple):
    """A sentence of the paper, and two scores of which the first should be higher."""

    says: str
    compared: str
    ours: str
    """Where the runs are: `METHOD` for the recipe's own, or `FOLDER/METHOD`."""
    theirs: str
    of: str = SOUP


CLAIMS = (
    Claim("more members help", "8 members, 2 members", "8-members/papa", "2-members/papa"),
    Claim("...", "5 members, 3 members", "5-members/papa", "3-members/papa"),
    Claim("variety of augmentation helps", "with the grid, without", "grid/papa", "papa"),
    Claim("averaging throughout is best", "throughout, the first half only", "papa", "first-half/papa"),
    Claim("...", "throughout, the second half only", "papa", "second-half/papa"),
    Claim(
        "one initialisation for all members is no better", "own initial weights, the same", "papa", "same-init/papa"
    ),
    Claim("REPAIR helps merges", "PAPA-all, every 1.7% of training: with, not", "repair/papa-all", "papa-all"),
    Claim("...", "PAPA-all, every 5 epochs: with, without", "every-5-repair/papa-all", "every-5/papa-all"),
    Claim("PAPA is better than its variants", "PAPA, PAPA-all", "papa", "papa-all"),
    Claim("...", "PAPA, PAPA-2", "papa", "papa-2"),
    Claim(
        "averages along trajectories add to it", "PAPA with SWA, PAPA", "swa/papa", "papa",
        "trajectory.test.average_soup",
    ),
    Claim("...", "PAPA with EMA, PAPA", "papa", "papa", "trajectory.test.average_soup"),
    Claim("DART is no better", "CIFAR-10: PAPA-all with its images, DART", "not-dart/papa-all", "dart/papa-all"),
    Claim("mutation harms", "PAPA-all without, with", "papa-all", "mutation/papa-all"),
    Claim("selection is no gain", "PAPA-2, with tournaments", "papa-2", "tournament/papa-2"),
    Claim("...", "PAPA-2, elitist", "papa-2", "elitist/papa-2"),
)  # fmt: skip


def runs_at(records: Sequence[Record], place: str) -> list[Record]:
    """The runs of a population of a claim."""
    start = f"{CLAIMS_FOLDER if '/' in place else OWN}{place}-seed"
    return [record for record in records if record["run"].startswith(start)]


def _cells(claim: Claim, records: Sequence[Record]) -> tuple[str, str, str, str]:
    """Both scores of a claim, their difference, and whether it shows."""
    digits = metric_of(records).digits
    ours, theirs = runs_at(records, claim.ours), runs_at(records, claim.theirs)
    found = less(ours, claim.of, theirs, SOUP)
    if found is None:
        return "", "", "", "not run yet"
    difference = mean_text(list(found.by_seed.values()), digits)
    return text(ours, claim.of, digits), text(theirs, SOUP, digits), difference, shows(found)


def claims(records: Sequence[Record]) -> str:
    """One row for each claim: both scores, their difference, and whether it shows; then how alike features are."""
    rows = [(claim.says, claim.compared, *_cells(claim, records)) for claim in CLAIMS]
    table = markdown(("the paper says", "compared", "the first", "the second", "difference", "here"), rows)
    return "\n\n".join(part for part in (table, similarity(records)) if part)


def claims_in_brief(records: Sequence[Record]) -> str:
    """A table of the claims that can be decided, and a list of the others."""
    rows = []
    others: dict[str, list[str]] = {}
    said = ""
    for claim in CLAIMS:
        said = said if claim.says == "..." else claim.says
        *_, difference, verdict = _cells(claim, records)
        if "shows" in verdict:
            rows.append((said, claim.compared, difference, verdict))
        elif difference:
            others.setdefault(said, []).append(f"{claim.compared} {difference}")
    table = markdown(("the paper says", "compared", "difference", "here"), rows) if rows else ""
    lines = [f"- {said}: {'; '.join(found)}" for said, found in others.items()]
    parts = (table, "Cannot be told:" if lines else "", "\n".join(lines))
    return "\n\n".join(part for part in parts if part)


NUM_MEMBERS = 4
LOWEST_GAIN = -5.0
"""In points; what is below is drawn there."""


def by_case(records: Sequence[Record]) -> dict[tuple[int, int], list[Record]]:
    """The runs of each size and length: populations, and the longer training that they are compared with."""

    def case(record: Record) -> tuple[int, int]:
        epochs = record["config"]["train"]["epochs"] // (NUM_MEMBERS if record["method"] == "longer" else 1)
        return record["config"]["data"]["max_train"], epochs

    return dict(sorted(grouped(records, case).items()))


def of_role(records: Sequence[Record], role: str) -> list[Record]:
    """The runs that are compared as `role`."""
    return [record for record in records if role_of(record) == role]


def gain(records: Sequence[Record]) -> Difference | None:
    """PAPA's soup minus one network trained longer, by seed."""
    return less(of_role(records, "papa"), SOUP, of_role(records, "longer"), MEAN)


def pays(records: Sequence[Record]) -> str:
    """One row for each size and length."""
    rows = []
    for (size, epochs), runs in by_case(records).items():
        alone, papa = of_role(runs, "independent"), of_role(runs, "papa")
        difference = gain(runs)
        rows.append(
            (
                *(f"{size:,}", f"{epochs}", mean_text([record["epochs"][-1]["loss"] for record in alone], 3)),
                *(text(alone, MEAN), text(of_role(runs, "longer"), MEAN), text(alone, ENSEMBLE), text(papa, SOUP)),
                "" if difference is None else mean_text(list(difference.by_seed.values())),
                gap_text(mean_gap_closed(papa, alone)),
            )
        )
    head = (
        *("images", "epochs", "training loss of one network at the end", "one network"),
        *("one network, 4 times longer", "ensemble of 4", "PAPA, average soup", "soup less the longer training"),
        "gap to the ensemble closed",
    )
    return markdown(head, rows)


def picture_of_gains(records: Sequence[Record]) -> Chart:
    """PAPA's soup minus one network trained longer, against the length of training.

    A line for each size of the data: means over seeds, with their standard deviation as a band. What is below
    `LOWEST_GAIN` is drawn there, so that the rest can be seen.
    """
    points: dict[int, list[Point]] = {}
    bands: dict[int, list[tuple[float, float, float]]] = {}
    for (size, epochs), runs in by_case(records).items():
        found = gain(runs)
        if found is not None and found.mean is not None:
            mean, spread = found.mean, found.deviation or 0.0
            mean, spread = (LOWEST_GAIN, 0.0) if mean < LOWEST_GAIN else (mean, spread)
            points.setdefault(size, []).append((epochs, mean))
            bands.setdefault(size, []).append((epochs, max(LOWEST_GAIN, mean - spread), mean + spread))
    (chart,) = line_chart(
        "where-it-pays",
        "PAPA's soup minus one network trained 4 times longer",
        f"Above zero the population is the better use of the compute. Less than {LOWEST_GAIN:g} points is "
        "drawn as that. Areas: one standard deviation.",
        ("epochs over the data", "accuracy, points"),
        [
            Line(f"{size:,} images", points[size], color, bands[size])
            for size, color in zip(points, SERIES_COLORS, strict=False)
        ],
        has_zero=True,
        is_log=True,
    )
    return chart
