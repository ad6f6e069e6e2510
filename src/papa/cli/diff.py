"""`papa diff A B`: compare the weights in two files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from papa.cli.evaluation_contexts import ContextOptions, context_from, parse
from papa.cli.options import use_one_thread
from papa.cli.tables import print_table, printable
from papa.errors import ConfigError
from papa.storage import json_text

if TYPE_CHECKING:
    from papa.analysis import Curve
    from papa.files import Difference, FileDiff

DESCRIPTION = """Compares the weights in two files, tensor by tensor, and optionally the loss between them.

Takes the same kinds of files as papa soup. distance is the norm of the difference, relative is the distance as a share
of A's norm. With a recipe or a factory, loss and score at eleven points on the straight line from A to B show whether
the two are in one basin, so that their average is a good network too.

examples:
  papa diff a.safetensors b.safetensors
  papa diff a.pt b.pt --key ema --top 20
  papa diff runs/one/members/000.safetensors runs/one/members/001.safetensors --recipe digits"""


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ContextOptions):
    """Options of `papa diff`."""

    first: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="A")]]
    """A file of weights."""
    second: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="B")]]
    """Another file of weights."""
    top: int = 10
    """The number of tensors to list, the largest relative distance first; 0 for all."""
    reset_batch_norm: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Estimate BatchNorm statistics again at every point between the two."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON."""


def main(arguments: Sequence[str]) -> int:
    options, config = parse(DiffOptions, arguments, prog="papa diff", description=DESCRIPTION)
    if options.top < 0:
        raise ConfigError(f"--top is {options.top}, expected the number of tensors to list, or 0 for all")
    from papa.files import diff_files  # imports torch, which help does without

    use_one_thread()
    diff = diff_files(
        options.first,
        options.second,
        key=options.key,
        evaluation_context=context_from(options, config),
        reset_batch_norm=options.reset_batch_norm,
    )
    if options.json:
        print(json_text(diff.to_json(), indent=2))
    else:
        print_diff(diff, options.top)
    return 0 if diff.tensors else 2


def print_diff(diff: FileDiff, top: int) -> None:
    """Print the largest differences, the total, and the curve between the two."""
    shown = diff.tensors[: top or None]
    rows = [_cells(tensor) for tensor in shown]
    print_table(("distance", "relative", "cosine", "elements", "tensor"), [*rows, _cells(diff.total)])
    hidden = len(diff.tensors) - len(shown)
    more = f", {hidden} not shown (--top 0 shows all)" if hidden else ""
    print(f"\n{len(diff.tensors)} tensors in both, {diff.num_equal} of them equal{more}")
    if diff.unlike:
        print(printable("not comparable; compared with A, B has\n" + "\n".join(f"  {line}" for line in diff.unlike)))
    if diff.curve is not None:
        print()
        print_curve(diff.curve)


def print_curve(curve: Curve) -> None:
    """Print losses and scores between two networks, and whether they are in one basin."""
    points = zip(curve.coefficients, curve.losses, curve.scores, strict=True)
    print_table(("A to B", "loss", "score"), [(f"{t:.1f}", f"{loss:.4f}", f"{score:.2f}") for t, loss, score in points])
    verdict = "they seem to be in one basin" if curve.in_one_basin else "they are not in one basin"
    sign = "at most" if curve.in_one_basin else "more than"
    print(
        f"\n{verdict}: the loss rises {curve.barrier:.4f} above the line between its ends, {sign} the limit of "
        f"{curve.allowed:.4f}, a tenth of the higher loss at the ends (or of 0.1)"
    )


def _cells(tensor: Difference) -> tuple[str, ...]:
    cosine = "-" if math.isnan(tensor.cosine) else f"{tensor.cosine:.6f}"
    return f"{tensor.distance:.4g}", f"{tensor.relative:.4g}", cosine, f"{tensor.numel:,}", tensor.name
