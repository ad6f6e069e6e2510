"""`papa eval RUN`: score the networks of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from papa.cli.options import parse_options, use_one_thread
from papa.cli.tables import print_table
from papa.lab.report.metric import metric_of
from papa.lab.runs import RunDirectory
from papa.storage import json_text

DESCRIPTION = """Scores the members, the ensemble and the soups of a finished run on its test data, or on other data.

A folder of images has one folder for each class, named as the run's classes are; it need not have all of them.
Images are resized as those of the run were.

examples:
  papa eval runs/digits-papa-seed1
  papa eval runs/digits-papa-seed1 --data validation
  papa eval runs/images-papa-seed1 --data new-photos --json
  papa eval runs/cifar10-vgg11-papa-seed1 --data.root ~/data"""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `papa eval`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The directory of a finished run."""
    data: str = "test"
    """test or validation, of the run's own data; or a folder with one folder of images for each class."""
    data_root: Annotated[str | None, tyro.conf.arg(name="data.root")] = None
    """The directory of the run's own data, if it was moved; None for where it was."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or cuda:1."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print scores and losses as JSON, as result.json has them."""


def main(arguments: Sequence[str]) -> int:
    options = parse_options(EvalOptions, arguments, prog="papa eval", description=DESCRIPTION)
    config = RunDirectory(options.run).read_config()
    from papa.lab.scoring import score_run  # imports torch, which help does without

    use_one_thread()
    found = score_run(options.run, options.data, data_root=options.data_root, device=options.device)
    best = {} if found.best_soup is None else {"best average soup": found.best_soup}
    if options.json:
        own = {name.replace(" ", "_"): {"score": one.score, "loss": one.loss} for name, one in best.items()}
        print(
            json_text({"data": options.data, "examples": found.num_examples, **found.scores.to_json(), **own}, indent=2)
        )
        return 0
    scores, metric = found.scores, metric_of([{"config": config}])
    rows: list[tuple[str, Any]] = [
        *((f"member {member}", one) for member, one in enumerate(scores.members) if member not in scores.dropped),
        ("ensemble", scores.ensemble),
        ("average soup", scores.average_soup),
        ("greedy soup", scores.greedy_soup),
        *best.items(),
    ]
    print_table(
        (f"{options.data}, {found.num_examples:,} examples", metric.label, "loss"),
        [(name, metric.text(one.score), f"{one.loss:.4f}") for name, one in rows],
    )
    return 0
