"""Where averaging stops paying: the same populations with less and more training, at two sizes of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from papa.lab.report.draw import SERIES_COLORS, Chart, Line, Point, line_chart
from papa.lab.report.table import LOWEST, gap_text, mean_gap_closed
from results.controls import role_of
from results.study import Study, Table
from results.tables import Difference, Record, by_seed, markdown, mean_text, paired, score

RECIPE = "digits-150"
NUM_MEMBERS = 4
LOWEST_GAIN = -5.0
"""In points; what is below is drawn there."""
EPOCHS = {75: (12, 20, 40, 80, 160, 320), 300: (3, 5, 10, 20, 40, 80)}
"""Lengths of training in epochs, by the number of images: the same numbers of steps for both."""


def commands(size: int, epochs: int) -> tuple[str, str]:
    """Populations of that length, and one network that is trained as many times longer as they have members."""
    place = f"runs/small/pays/{size}-images-{epochs}-epochs"
    words = f"--seeds 1,2,3 --data.max-train {size} --parallel 2 --data.root DATA"
    return (
        f"papa compare {RECIPE} --methods independent,papa --train.epochs {epochs} {words} --out {place}",
        f"papa compare {RECIPE} --methods longer --train.epochs {epochs} {words} --out {place}-long",
    )


Case = tuple[int, int]
"""The number of images, and of epochs of a population."""


def by_case(records: Sequence[Record]) -> dict[Case, list[Record]]:
    """The runs of each size and length: populations, and the longer training that they are compared with."""
    found: dict[Case, list[Record]] = {}
    for record in records:
        epochs = record["config"]["train"]["epochs"] // (NUM_MEMBERS if role_of(record) == "longer" else 1)
        found.setdefault((record["config"]["data"]["max_train"], epochs), []).append(record)
    return dict(sorted(found.items()))


def of_role(records: Sequence[Record], role: str) -> list[Record]:
    """The runs that are compared as `role`."""
    return [record for record in records if role_of(record) == role]


def gain(records: Sequence[Record]) -> Difference | None:
    """PAPA's soup minus one network trained longer, by seed."""
    soups = by_seed(of_role(records, "papa"), score("average_soup"))
    return paired(soups, by_seed(of_role(records, "longer"), score("mean")))


def shares(records: Sequence[Record]) -> list[float]:
    """The share of the gap from one network to the ensemble that PAPA's soup closes, in percent, by seed."""
    populations = [*of_role(records, "independent"), *of_role(records, "papa")]
    seeds = dict.fromkeys(record["seed"] for record in of_role(records, "papa"))
    found = []
    for seed in seeds:
        own = [record for record in populations if record["seed"] == seed]
        closed = mean_gap_closed(of_role(own, "papa"), own)
        found += [] if closed is None else [closed]
    return found


def table(records: Sequence[Record]) -> str:
    """One row for each size and length."""
    rows = []
    for (size, epochs), runs in by_case(records).items():
        difference = gain(runs)
        long = of_role(runs, "longer")
        populations = [*of_role(runs, "independent"), *of_role(runs, "papa")]
        rows.append(
            (
                *(f"{size:,}", f"{epochs}"),
                mean_text([record["epochs"][-1]["loss"] for record in of_role(runs, "independent")], 3),
                *(mean_text(list(map(score("mean"), some))) for some in (of_role(runs, "independent"), long)),
                mean_text(list(map(score("ensemble"), of_role(runs, "independent")))),
                mean_text(list(map(score("average_soup"), of_role(runs, "papa")))),
                "" if difference is None else mean_text(list(difference.by_seed.values())),
                gap_text(mean_gap_closed(of_role(runs, "papa"), populations)),
            )
        )
    head = (
        *("images", "epochs", "training loss of one network at the end", "one network"),
        *("one network, 4 times longer", "ensemble of 4", "PAPA, average soup", "soup less the longer training"),
        "gap to the ensemble closed",
    )
    return markdown(head, rows)


def picture_of_gains(records: Sequence[Record]) -> Chart:
    """PAPA's soup minus one network trained longer, against the length of training."""
    lines = _lines(records, lambda runs: (found.values or []) if (found := gain(runs)) else [], lowest=LOWEST_GAIN)
    (chart,) = line_chart(
        "where-it-pays",
        "PAPA's soup minus one network trained 4 times longer",
        f"Above zero the population is the better use of the compute. Less than {LOWEST_GAIN:g} points is "
        "drawn as that. Areas: one standard deviation.",
        ("epochs over the data", "accuracy, points"),
        lines,
        has_zero=True,
        is_log=True,
    )
    return chart


def picture_of_shares(records: Sequence[Record]) -> Chart:
    """The share of the ensemble's gain that PAPA's soup keeps, against the length of training."""
    (chart,) = line_chart(
        "gap-closed",
        "The share of the ensemble's gain that PAPA's soup keeps",
        "100% is the ensemble of 4 independent networks, 0% one of them; less than -100% is drawn as that. "
        "Areas: one standard deviation.",
        ("epochs over the data", "share, %"),
        _lines(records, shares, lowest=LOWEST),
        has_zero=True,
        is_log=True,
    )
    return chart


def _lines(
    records: Sequence[Record], values_of: Callable[[Sequence[Record]], Sequence[float]], *, lowest: float
) -> list[Line]:
    """A line for each size of the data: means over seeds, with their standard deviation as a band.

    What is below `lowest` is drawn there, so that the rest can be seen.
    """
    points: dict[int, list[Point]] = {}
    bands: dict[int, list[tuple[float, float, float]]] = {}
    for (size, epochs), runs in by_case(records).items():
        if values := values_of(runs):
            mean, spread = fmean(values), stdev(values) if len(values) > 1 else 0.0
            if mean < lowest:
                mean, spread = lowest, 0.0
            low, middle, high = max(lowest, mean - spread), mean, mean + spread
            points.setdefault(size, []).append((epochs, middle))
            bands.setdefault(size, []).append((epochs, low, high))
    return [
        Line(f"{size:,} images", points[size], color=color, band=bands[size])
        for size, color in zip(points, SERIES_COLORS, strict=False)
    ]


STUDY = Study(
    name="pays",
    title="Where averaging stops paying",
    tables=(
        Table(
            title=f"Handwritten digits, {' and '.join(f'{size:,}' for size in EPOCHS)} images",
            commands=tuple(
                command for size, lengths in EPOCHS.items() for epochs in lengths for command in commands(size, epochs)
            ),
            render=table,
        ),
    ),
)
