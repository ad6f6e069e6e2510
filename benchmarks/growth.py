"""How time grows with the number of members and with the size of the network: exponents fitted to the measurements.

An exponent of 1 is proportional growth. It is fitted to the three largest cases, since overhead that does not grow
hides growth in small ones. Times are of the processor, on one thread: training one step of every member, a
push, a checkpoint, soups, alignment of all members to the first, and the page of a run.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from torch.nn import functional as F

import papa
from _bench import Result, finish, parser, peak_extra_megabytes
from papa.core.group import LocalGroup
from papa.lab.report.draw import SERIES_COLORS, Chart, Line, line_chart, standalone_svg
from papa.lab.report.page import run_page
from papa.training import Settings
from papa.training.checkpoints import CheckpointWriter, member_state
from papa.training.entry import start_training

MEMBERS = (2, 4, 8, 16, 32, 64)
WIDTH = 96
"""For all numbers of members: 13,000 numbers in a network."""
WIDTHS = (96, 192, 384, 768, 1536)
"""For five members: networks of 13,000 to 2.4 million numbers."""
FEW = 5
INPUTS, CLASSES, BATCH = 32, 10, 64
MOST = 1.15
"""The largest exponent that counts as proportional."""
SQUARED = ("greedy soup",)
"""What grows faster by its nature: each of up to p trials is a mean of up to p members."""


@dataclass(frozen=True)
class Case:
    """A population of some size, of networks of some width."""

    num_members: int
    width: int

    def make_net(self) -> nn.Module:
        """Two hidden layers."""
        return nn.Sequential(
            nn.Linear(INPUTS, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU(),
            nn.Linear(self.width, CLASSES),
        )  # fmt: skip

    @property
    def numbers(self) -> int:
        """In one network."""
        return sum(parameter.numel() for parameter in self.make_net().parameters())


def parts(case: Case, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured, by name."""
    data = torch.randn(10 * BATCH, INPUTS), torch.randint(CLASSES, (10 * BATCH,))
    batch = data[0][:BATCH], data[1][:BATCH]
    settings = Settings(num_members=case.num_members, num_epochs=10_000, batch_size=BATCH, device="cpu")
    training = start_training(case.make_net, data, settings, papa.Independent())
    yield "training step", training._take_step
    population = papa.Population.build(case.make_net, case.num_members, seed=1)
    yield "push", papa.Averager(population, papa.Push(alpha=0.99, every_steps=1)).step
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
    states = {member: member_state(net, optimizers[member]) for member, net in enumerate(population)}
    writer = CheckpointWriter(folder, group=LocalGroup(), num_members=case.num_members, keep=1)
    steps = itertools.count()

    def save() -> None:
        writer.save(next(steps), states, {}, lambda: None)
        assert writer.settle() is None

    yield "checkpoint", save
    yield "average soup", lambda: papa.average_soup(population)

    @torch.no_grad()
    def loss(net: nn.Module) -> float:
        return float(F.cross_entropy(net(batch[0]), batch[1]))

    yield "greedy soup", lambda: papa.greedy_soup(population, loss, higher_is_better=False)
    yield "alignment", lambda: papa.align_all_(list(population), [batch[0]])
    yield "page of a run", lambda: run_page(*_result(case.num_members))


def _result(num_members: int) -> tuple[Mapping[str, object], Sequence[Mapping[str, object]]]:
    scores = [90.0 + index % 7 for index in range(num_members)]
    found = {"members": scores, "mean": fmean(scores), "min": 90.0, "max": 96.0, "ensemble": 97.0}
    found |= {"average_soup": 96.5, "greedy_soup": 96.5}
    config = {"members": num_members, "seed": 1}
    result = {"recipe": "digits", "method": "papa", "seed": 1, "config": config, "test": found, "validation": found}
    events = [
        {
            **{"event": "epoch", "epoch": epoch, "step": 10 * epoch, "lr": 0.1, "seconds": 1.0},
            **{"losses": scores, "validation": scores, "distances": scores, "validation_ensemble": 97.0},
            "validation_average_soup": 96.5,
        }
        for epoch in range(1, 21)
    ]
    return {**result, "seconds": {"train": 1.0}, "environment": {}, "num_averagings": 20}, events


def seconds_of(run: Callable[[], object], rounds: int) -> float:
    """The least time of the processor for one call, over some rounds of at least 20 ms."""
    run()
    best, times = math.inf, 1
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(times):
            run()
        elapsed = time.process_time() - begin
        best = min(best, elapsed / times)
        times = max(times, math.ceil(0.02 / max(elapsed / times, 1e-6)))
    return best


def exponent(points: Mapping[float, float]) -> float:
    """The slope of a straight line through the logarithms of the last three points.

    Example:
        >>> round(exponent({1: 2.0, 2: 8.0, 4: 32.0}), 6)
        2.0
    """
    last = list(points.items())[-3:]
    xs, ys = [math.log(x) for x, _ in last], [math.log(max(y, 1e-9)) for _, y in last]
    mean_x, mean_y = fmean(xs), fmean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def measured(cases: Mapping[float, Case], rounds: int) -> dict[str, dict[float, float]]:
    """Seconds by part and place."""
    found: dict[str, dict[float, float]] = {}
    for place, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            for name, run in parts(case, Path(folder)):
                found.setdefault(name, {})[place] = seconds_of(run, rounds)
    return found


def memory(cases: Mapping[float, Case]) -> dict[float, float]:
    """The megabytes of a population with optimizers after a step, by place."""

    def hold(place: float) -> None:
        case = cases[place]
        settings = Settings(num_members=case.num_members, num_epochs=1, batch_size=BATCH, device="cpu")
        data = torch.randn(2 * BATCH, INPUTS), torch.randint(CLASSES, (2 * BATCH,))
        start_training(case.make_net, data, settings, papa.Push(alpha=0.99, every_steps=1))._take_step()

    return {place: peak_extra_megabytes(partial(hold, place)) for place in cases}


def picture(found: Mapping[str, Mapping[float, float]]) -> Chart:
    """How often the time has doubled since two members, and how often the number of members has."""
    lines = [Line("proportional", [(float(size), math.log2(size / MEMBERS[0])) for size in MEMBERS], color="quiet")]
    lines += [
        Line(name, [(x, math.log2(y / next(iter(times.values())))) for x, y in times.items()], color=color)
        for (name, times), color in zip(found.items(), itertools.cycle(SERIES_COLORS), strict=False)
    ]
    (chart,) = line_chart(
        "growth",
        "Time against the number of members",
        "Doublings of the time of two members; a straight line has a fixed exponent.",
        ("members", "doublings of the time"),
        lines,
        is_log=True,
    )
    return chart


def main() -> None:
    """Print the exponents, and write a picture if asked."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--picture", type=Path, help="also write this SVG file")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    by_members = {float(size): Case(size, WIDTH) for size in MEMBERS}
    by_size = {float(Case(FEW, width).numbers): Case(FEW, width) for width in WIDTHS}
    results = []
    for words, cases in ((f"p = {MEMBERS[0]} to {MEMBERS[-1]}", by_members), ("13 thousand to 2.4 million", by_size)):
        found = measured(cases, chosen.rounds)
        what = "members" if cases is by_members else "numbers in a network"
        for name, times in found.items():
            target = None if name in SQUARED and cases is by_members else MOST
            last = list(times.values())[-1]
            results.append(
                Result(name=f"{name}: exponent in {what}, {words}", seconds=last, ratio=exponent(times), target=target)
            )
        used = memory(cases)
        results.append(
            Result(name=f"memory of training: exponent in {what}, {words}", ratio=exponent(used), target=MOST)
        )
        if chosen.picture and cases is by_members:
            chosen.picture.write_text(standalone_svg(picture(found)))
    finish(results, chosen, title="Growth")


if __name__ == "__main__":
    main()
