"""Every coupling on the same task: what the soup reaches, how far members are apart, and what they send."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import nn

from papa.core.population import Population
from papa.couplings.masks import depths
from papa.lab.config import ModelConfig
from papa.lab.models import make_model
from papa.lab.report.draw import SERIES_COLORS, Chart, Line, line_chart
from papa.lab.report.metric import metric_of
from papa.lab.report.table import gap_text, mean_gap_closed
from results.study import Study, Table
from results.tables import Record, by_seed, markdown, mean_text, paired, score, shows

RECIPE = "digits-150"
SEEDS, OTHER_SEEDS = "1,2,3,4,5,6,7,8,9,10", "11,12,13"
SETTING = "--diversity.same-init --parallel 2 --data.root DATA"
"""All members start from the same weights, which most of these methods were published for."""
VALIDATION = "--data.max-train 300 --data.validation 0.6 --train.validate-every 10"
"""120 images for training, as in all runs, and 180 to choose by."""


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """A method, and the values of its own option that were tried."""

    method: str
    option: str = ""
    """As typed."""
    tried: tuple[float, ...] = ()
    chosen: float | None = None
    """The one with the best average soup on validation data."""
    exchanges: Callable[[float, int], float]
    """How often all weights are exchanged in a training, there and back: from the option and the number of steps."""

    def command(self, value: float | None, seeds: str, out: str, *more: str) -> str:
        """The method with a value of its option."""
        own = "" if value is None else f"--{self.option} {value:g}"
        words = ("papa compare", RECIPE, "--methods", self.method, "--seeds", seeds, own, *more, SETTING)
        return " ".join(filter(None, (*words, "--out", f"runs/small/couplings/{out}")))

    @property
    def trials(self) -> tuple[str, ...]:
        """Every value on validation data, with seeds that the comparison does not use."""
        return tuple(
            self.command(value, OTHER_SEEDS, f"tune/{self.method}-{value:g}", VALIDATION) for value in self.tried
        )

    @property
    def comparison(self) -> str:
        """Ten seeds with the chosen value."""
        return self.command(self.chosen, SEEDS, self.method)


NUM_MEMBERS = 4
STEPS_PER_EPOCH = 4


@functools.cache
def share_by_depth() -> float:
    """The part of its share that `wash` permutes: all in the first layer, nothing in the last."""
    layout = Population([_network(ModelConfig(name="digits-cnn"))])._layout
    slots = [(slot.numel, depth) for slot, depth in zip(layout.slots, depths(layout), strict=True) if slot.is_parameter]
    return sum(numel * (1.0 - depth) for numel, depth in slots) / sum(numel for numel, _ in slots)


def _network(options: ModelConfig) -> nn.Module:
    return make_model(options.name, num_classes=10, in_channels=1, image_size=8, width=options.width)


COUPLINGS = (
    Coupling(
        method="papa", option="average.half-life", tried=(0.01, 0.03, 0.1, 0.3), chosen=0.1,
        exchanges=lambda value, steps: steps / 5,
    ),
    Coupling(method="papa-auto", exchanges=lambda value, steps: steps / 5),
    Coupling(
        method="papa-all", option="average.every-epochs", tried=(1, 3, 10, 30), chosen=10,
        exchanges=lambda value, steps: steps / STEPS_PER_EPOCH / value,
    ),
    Coupling(
        method="papa-2", option="average.every-epochs", tried=(1, 3, 10, 30), chosen=3,
        exchanges=lambda value, steps: steps / STEPS_PER_EPOCH / value,
    ),
    Coupling(
        method="sparta", option="coupling.share", tried=(0.005, 0.02, 0.06, 0.2), chosen=0.02,
        exchanges=lambda value, steps: steps * value,
    ),
    Coupling(
        method="wash", option="coupling.share", tried=(0.001, 0.01, 0.05, 0.2), chosen=0.05,
        exchanges=lambda value, steps: steps * value * share_by_depth(),
    ),
    Coupling(
        method="easgd", option="coupling.every-steps", tried=(1, 2, 5, 10), chosen=10,
        exchanges=lambda value, steps: steps / value * (1 + 1 / NUM_MEMBERS),
    ),
    Coupling(
        method="lookahead", option="coupling.every-steps", tried=(2, 5, 20, 60), chosen=5,
        exchanges=lambda value, steps: steps / value * (1 + 1 / NUM_MEMBERS),
    ),
    Coupling(
        method="diloco", option="coupling.every-steps", tried=(5, 20, 60, 120), chosen=120,
        exchanges=lambda value, steps: steps / value * (1 + 2 / NUM_MEMBERS),
    ),
    Coupling(
        method="noloco", option="coupling.every-steps", tried=(2, 5, 20, 60), chosen=2,
        exchanges=lambda value, steps: steps / value,
    ),
    Coupling(
        method="dppf", option="coupling.spread", tried=(0.2, 0.5, 2, 5), chosen=0.2,
        exchanges=lambda value, steps: steps * 1.5 / 4,
    ),
    Coupling(
        method="grawa", option="coupling.every-steps", tried=(1, 4, 16, 64), chosen=64,
        exchanges=lambda value, steps: steps / value,
    ),
)  # fmt: skip
BY_METHOD = {coupling.method: coupling for coupling in COUPLINGS}
INDEPENDENT = f"papa compare {RECIPE} --methods independent --seeds {SEEDS} {SETTING} --out runs/small/couplings/none"


def trials(records: Sequence[Record]) -> str:
    """The average soup on validation data for each value that was tried, the chosen one in bold."""
    digits = metric_of(records).digits
    rows = []
    for coupling in COUPLINGS:
        cells = []
        for value in coupling.tried:
            names = [command for command in coupling.trials if command.endswith(f"/{coupling.method}-{value:g}")]
            found = [record for record in records if _value(record, coupling) == value] if names else []
            text = f"{value:g}: {mean_text([validation_soup(record) for record in found], digits)}"
            cells.append(f"**{text}**" if value == coupling.chosen else text)
        if cells:
            rows.append((coupling.method, f"`--{coupling.option}`", *cells))
    return markdown(("method", "its option", *[""] * max(len(row) - 2 for row in rows)), rows)


def validation_soup(record: Record) -> float | None:
    """The average soup's score on validation data."""
    value: float | None = record["validation"]["average_soup"]
    return value


def best_tried(records: Sequence[Record], coupling: Coupling) -> float | None:
    """The tried value with the best average soup on validation data; None while trials are missing."""
    found = {
        value: fmean(scores)
        for value in coupling.tried
        if (scores := [score for record in records if _value(record, coupling) == value
                       if (score := validation_soup(record)) is not None])
    }  # fmt: skip
    if len(found) < len(coupling.tried) or not found:
        return None
    return (max if metric_of(records).higher_is_better else min)(found, key=lambda value: found[value])


def _value(record: Record, coupling: Coupling) -> float | None:
    """The value of a method's own option in a run of it; None for a run of another method."""
    if record["method"] != coupling.method or not coupling.option:
        return None
    group, name = coupling.option.replace("-", "_").split(".")
    value: float | None = record["config"][group][name]
    return value


def megabytes(coupling: Coupling, record: Record) -> float:
    """What a process with one member sends in a training, if each member has its own."""
    model = _network(ModelConfig(**record["config"]["model"]))
    numbers: int = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    steps: int = record["epochs"][-1]["step"]
    exchanges = coupling.exchanges(_value(record, coupling) or 0.0, steps)
    return exchanges * 2 * (1 - 1 / NUM_MEMBERS) * numbers * 4 / 1e6


def by_method(records: Sequence[Record]) -> Mapping[str, list[Record]]:
    """The runs of each method, best average soup first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["method"], []).append(record)
    return dict(sorted(groups.items(), key=lambda group: -fmean(_soups(group[1]))))


def _soups(records: Sequence[Record]) -> list[float]:
    return [value for record in records if (value := score("average_soup")(record)) is not None] or [0.0]


def comparison(records: Sequence[Record]) -> str:
    """One row for each coupling, best average soup first."""
    rows = []
    for method, runs in by_method(records).items():
        coupling = BY_METHOD.get(method)
        sent = "0" if coupling is None else f"{megabytes(coupling, runs[0]):.3g}"
        value = None if coupling is None else _value(runs[0], coupling)
        own = "" if value is None or coupling is None else f"{coupling.option.split('.')[1]} {value:g}"
        cells = (mean_text([score(key)(run) for run in runs]) for key in ("mean", "ensemble", "average_soup"))
        spread = mean_text([run["epochs"][-1]["distance"] for run in runs])
        gap = gap_text(mean_gap_closed(runs, records)) if method != "independent" else ""
        rows.append((method, own, *cells, *_gain(runs, records), gap, spread, sent))
    head = (
        *("method", "its option", "mean of members", "ensemble", "average soup"),
        *("soup less the mean of independent networks", "a gain", "gap to the ensemble closed"),
        *("distance to the mean at the end", "megabytes sent"),
    )
    return markdown(head, rows)


def _gain(runs: Sequence[Record], records: Sequence[Record]) -> tuple[str, str]:
    """The average soup minus the mean of independent members, by seed, and whether it shows."""
    apart = by_seed([record for record in records if record["method"] == "independent"], score("mean"))
    found = paired(by_seed(runs, score("average_soup")), apart)
    return ("", "") if found is None else (mean_text(list(found.by_seed.values())), shows(found))


def picture(records: Sequence[Record]) -> Chart:
    """The average soup against what is sent."""
    found = {method: runs for method, runs in by_method(records).items() if method in BY_METHOD}
    places = {method: (megabytes(BY_METHOD[method], runs[0]), fmean(_soups(runs))) for method, runs in found.items()}
    lines = [Line(method, [place], SERIES_COLORS[index % 6]) for index, (method, place) in enumerate(places.items())]
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


STUDY = Study(
    name="couplings",
    title="Every coupling on the same task",
    tables=(
        Table(
            title="The option of each method",
            commands=tuple(command for coupling in COUPLINGS for command in coupling.trials),
            render=trials,
        ),
        Table(
            title="150 handwritten digits",
            commands=(INDEPENDENT, *(coupling.comparison for coupling in COUPLINGS)),
            render=comparison,
        ),
    ),
)
