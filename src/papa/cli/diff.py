"""`papa diff A B`: compare two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.checkpoint import json_text
from papa.cli.arguments import use_one_thread
from papa.cli.evaluation_contexts import KitchenOptions, kitchen_from, parse
from papa.cli.tables import print_table
from papa.errors import ConfigError
from papa.files import Curve, Difference, FileDiff, diff_files

DESCRIPTION = """Compares two checkpoints tensor by tensor; given data, also what lies between them.

Takes what papa soup takes, one checkpoint each. distance is the norm of the difference, relative the same as a share
of A's norm. With a recipe or a factory, loss and score at eleven points of the straight line from A to B show whether
the two lie in one basin, so that their average is a good network too.

examples:
  papa diff a.safetensors b.safetensors
  papa diff a.pt b.pt --key ema --top 20
  papa diff runs/one/members/000.safetensors runs/one/members/001.safetensors --recipe digits"""


@dataclass(frozen=True, kw_only=True)
class DiffOptions(KitchenOptions):
    """Options of `papa diff`."""

    first: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="A")]]
    """A checkpoint."""
    second: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="B")]]
    """Another."""
    top: int = 10
    """How many tensors to list, the largest relative distance first; 0 for all."""
    reset_batch_norm: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Estimate BatchNorm statistics anew at every point between the two."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON instead."""


def main(arguments: Sequence[str]) -> int:
    """Compare two checkpoints."""
    options, config = parse(DiffOptions, arguments, prog="papa diff", description=DESCRIPTION)
    if options.top < 0:
        raise ConfigError(f"--top is {options.top}, expected how many tensors to list, or 0 for all")
    use_one_thread()
    diff = diff_files(
        options.first,
        options.second,
        key=options.key,
        evaluation_context=kitchen_from(options, config),
        reset_batch_norm=options.reset_batch_norm,
    )
    if options.json:
        print(json_text(diff.to_json(), indent=2))
    else:
        print_diff(diff, options.top)
    return 0 if diff.tensors else 2


def print_diff(diff: FileDiff, top: int) -> None:
    """Print the largest differences, the sum of all, and what lies between the two."""
    shown = diff.tensors[: top or None]
    rows = [_cells(tensor) for tensor in shown]
    print_table(("distance", "relative", "cosine", "numbers", "tensor"), [*rows, _cells(diff.total)])
    hidden = len(diff.tensors) - len(shown)
    more = f", {hidden} not shown (--top 0 shows all)" if hidden else ""
    print(f"\n{len(diff.tensors)} tensors in both, {diff.num_equal} of them equal{more}")
    if diff.unlike:
        print("not comparable; compared with A, B has\n" + "\n".join(f"  {line}" for line in diff.unlike))
    if diff.curve is not None:
        print()
        print_curve(diff.curve)


def print_curve(curve: Curve) -> None:
    """Print losses and scores between two networks, and what follows from them."""
    points = zip(curve.positions, curve.points, strict=True)
    print_table(("A to B", "loss", "score"), [(f"{t:.1f}", f"{p.loss:.4f}", f"{p.score:.2f}") for t, p in points])
    verdict = "they look as if they lie in one basin" if curve.in_one_basin else "they do not lie in one basin"
    sign = "at most" if curve.in_one_basin else "more than"
    print(
        f"\n{verdict}: the loss rises {curve.barrier:.4f} above the line between its ends, {sign} the "
        f"{curve.allowed:.4f} that is a tenth of the higher end's loss (or of 0.1)"
    )


def _cells(tensor: Difference) -> tuple[str, ...]:
    cosine = "-" if math.isnan(tensor.cosine) else f"{tensor.cosine:.6f}"
    return f"{tensor.distance:.4g}", f"{tensor.relative:.4g}", cosine, f"{tensor.numel:,}", tensor.name
