"""Every coupling on the same task: what the soup reaches, how far members are apart, and what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeAlias

from papa.lab.models import make_model
from papa.lab.report.draw import SERIES_COLORS, Chart, Line, line_chart
from papa.lab.report.metric import metric_of
from papa.lab.report.table import gap_text, mean_gap_closed
from results.record import Record
from results.tables import ENSEMBLE, MEAN, SOUP, grouped, less, markdown, mean_text, of_method, shows, text, value

NUM_MEMBERS, STEPS_PER_EPOCH = 4, 4
Exchanges: TypeAlias = Callable[[float, int], float]
"""How often all weights are exchanged in a training, there and back: from the option and the number of steps."""


WASH_SHARE = 0.43971042560059
"""The part of its share that `wash` permutes in `digits-cnn`: all in the first layer, nothing in the last."""


COUPLINGS: dict[str, tuple[str, Exchanges]] = {
    "papa": ("average.half_life", lambda value, steps: steps / 5),
    "papa-auto": ("", lambda value, steps: steps / 5),
    "papa-all": ("average.every_epochs", lambda value, steps: steps / STEPS_PER_EPOCH / value),
    "papa-2": ("average.every_epochs", lambda value, steps: steps / STEPS_PER_EPOCH / value),
    "sparta": ("coupling.share", lambda value, steps: steps * value),
    "wash": ("coupling.share", lambda value, steps: steps * value * WASH_SHARE),
    "easgd": ("coupling.every_steps", lambda value, steps: steps / value * (1 + 1 / NUM_MEMBERS)),
    "lookahead": ("coupling.every_steps", lambda value, steps: steps / value * (1 + 1 / NUM_MEMBERS)),
    "diloco": ("coupling.every_steps", lambda value, steps: steps / value * (1 + 2 / NUM_MEMBERS)),
    "noloco": ("coupling.every_steps", lambda value, steps: steps / value),
    "dppf": ("coupling.spread", lambda value, steps: steps * 1.5 / 4),
    "grawa": ("coupling.every_steps", lambda value, steps: steps / value),
}
"""The own option of each method, which was tried and chosen by the average soup on validation data."""


def option_value(record: Record) -> float | None:
    """The value of a method's own option in a run of it; None for a method without one."""
    option, _ = COUPLINGS.get(record["method"], ("", None))
    return value(record["config"], option) if option else None


def coupling_trials(records: Sequence[Record]) -> str:
    """The average soup on validation data for each value that was tried, the best in bold."""
    metric = metric_of(records)
    rows = []
    for method, runs in grouped(records, lambda record: record["method"]).items():
        tried = grouped(runs, option_value)
        best = best_tried(runs)
        cells = [f"{one:g}: {text(some, 'validation.average_soup', metric.digits)}" for one, some in tried.items()]
        cells = [f"**{cell}**" if one == best else cell for one, cell in zip(tried, cells, strict=True)]
        rows.append((method, f"`--{COUPLINGS[method][0].replace('_', '-')}`", *cells))
    return markdown(("method", "its option", *[""] * max(len(row) - 2 for row in rows)), rows)


def best_tried(records: Sequence[Record]) -> float:
    """The tried value with the best average soup on validation data."""
    means = {
        tried: fmean(value(record, "validation.average_soup") or 0.0 for record in runs)
        for tried, runs in grouped(records, option_value).items()
    }
    best: float = (max if metric_of(records).higher_is_better else min)(means, key=lambda tried: means[tried])
    return best


def megabytes(record: Record) -> float:
    """What a process with one member sends in a training, if each member has its own."""
    options = record["config"]["model"]
    model = make_model(options["name"], num_classes=10, in_channels=1, image_size=8, width=options["width"])
    numbers: int = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    exchanges = COUPLINGS[record["method"]][1](option_value(record) or 0.0, record["epochs"][-1]["step"])
    return exchanges * 2 * (1 - 1 / NUM_MEMBERS) * numbers * 4 / 1e6


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The runs of each method, best average soup first."""
    groups = grouped(records, lambda record: record["method"])
    return dict(sorted(groups.items(), key=lambda group: -fmean(value(run, SOUP) or 0.0 for run in group[1])))


def couplings(records: Sequence[Record]) -> str:
    """One row for each coupling, best average soup first."""
    independent = of_method(records, "independent")
    rows = []
    for method, runs in by_method(records).items():
        option = COUPLINGS[method][0].partition(".")[2].replace("_", "-") if method in COUPLINGS else ""
        gain = less(runs, SOUP, independent, MEAN)
        rows.append(
            (
                *(method, f"{option} {option_value(runs[0]):g}" if option else ""),
                *(text(runs, of) for of in (MEAN, ENSEMBLE, SOUP)),
                *(("", "") if gain is None else (mean_text(list(gain.by_seed.values())), shows(gain))),
                gap_text(mean_gap_closed(runs, records)) if method != "independent" else "",
                mean_text([run["epochs"][-1]["distance"] for run in runs]),
                f"{megabytes(runs[0]):.3g}" if method in COUPLINGS else "0",
            )
        )
    head = (
        *("method", "its option", "mean of members", "ensemble", "average soup"),
        *("soup less the mean of independent networks", "a gain", "gap to the ensemble closed"),
        *("distance to the mean at the end", "megabytes sent"),
    )
    return markdown(head, rows)


def picture(records: Sequence[Record]) -> Chart:
    """The average soup against what is sent."""
    found = {method: runs for method, runs in by_method(records).items() if method in COUPLINGS}
    lines = [
        Line(method, [(megabytes(runs[0]), fmean(value(run, SOUP) or 0.0 for run in runs))], SERIES_COLORS[index % 6])
        for index, (method, runs) in enumerate(found.items())
    ]
    (chart,) = line_chart(
        "couplings",
        "What a coupling sends, and what its soup reaches",
        "Means over ten seeds. Further left: less is sent; higher: a better network.",
        ("megabytes sent by a member in the whole training", "average soup, test accuracy, %"),
        lines,
        is_log=True,
        names_points=True,
    )
    return chart
