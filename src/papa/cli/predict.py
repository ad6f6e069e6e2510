"""`papa predict RUN IMAGES ...`: label images with a network of a finished run."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from papa.cli.options import parse_options, use_one_thread
from papa.cli.tables import printable
from papa.errors import ConfigError, DataError, RunError, did_you_mean
from papa.storage import file_errors, json_text, write_atomically

if TYPE_CHECKING:
    from papa.lab.scoring import Label

DESCRIPTION = """Labels images with the average soup of a finished run: the most probable class, and its probability.

Prints CSV with the columns path, label and probability; with --json, a JSON object on each line. Control characters in
names are escaped when they are printed; a file of --out has names as they are. Images that cannot be decoded are named
on standard error and left out; the exit code is then 2.

examples:
  papa predict runs/images-papa-seed1 new-photos
  papa predict runs/images-papa-seed1 cat.jpg dog.jpg --json
  papa predict runs/images-papa-seed1 new-photos --network ensemble -o labels.csv"""

NETWORKS = ("soup", "greedy", "best", "ensemble")


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `papa predict`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The directory of a finished run."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER [FOLDER ...]")]
    """Folders of images, in any depth, or image files."""
    network: str = "soup"
    """soup, greedy, best (the best average soup by validation, if it was kept), ensemble, or the index of a member."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or cuda:1."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write a JSON object on each line instead of CSV."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write to this file instead of standard output; JSON if it ends in .jsonl."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options = parse_options(PredictOptions, arguments, prog="papa predict", description=DESCRIPTION)
    if not options.images:
        raise ConfigError("no image was named, expected folders or files: see papa predict --help")
    if options.network not in NETWORKS and not options.network.isdecimal():
        expected = f"{did_you_mean(options.network, NETWORKS)}, or the index of a member"
        raise ConfigError(f"--network is {options.network}: {expected}")
    out = options.out
    if out is not None and (out.is_dir() or (out.exists() and not options.overwrite)):
        found = "is a directory, expected a file" if out.is_dir() else "already exists"
        raise RunError(f"{out} {found}: choose another --out, or replace it with --overwrite")
    from papa.lab.data.files import find_images  # imports torch, which help does without
    from papa.lab.scoring import label_images

    use_one_thread()
    network = int(options.network) if options.network.isdecimal() else options.network
    labels = label_images(options.run, find_images(options.images), network=network, device=options.device)
    damaged: list[DataError] = []
    is_json = options.json or (out is not None and out.suffix == ".jsonl")
    lines = _lines(_decoded(labels, damaged), is_json=is_json)
    if out is None:
        for line in lines:
            print(printable(line), end="", flush=True)
    else:
        content = "".join(lines)
        with file_errors(out.parent, "make the directory"):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, content.encode(errors="surrogateescape"))
        print(f"wrote {printable(str(out))}")
    return 2 if damaged else 0


def _decoded(labels: Iterable[Label | DataError], damaged: list[DataError]) -> Iterator[Label]:
    """The labels; errors are printed and collected."""
    for one in labels:
        if isinstance(one, DataError):
            damaged.append(one)
            print(printable(f"left out: {one}"), file=sys.stderr, flush=True)
        else:
            yield one


def _lines(labels: Iterable[Label], *, is_json: bool) -> Iterator[str]:
    if not is_json:
        yield _csv_line(("path", "label", "probability"))
    for one in labels:
        probability = round(one.probability, 6)
        if is_json:
            yield json_text({"path": one.path, "label": one.label, "probability": probability}) + "\n"
        else:
            yield _csv_line((one.path, one.label, f"{probability:.6f}"))


def _csv_line(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
