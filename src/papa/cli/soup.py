"""`papa soup`: average the weights in several files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.progress
import tyro
from rich.console import Console

from papa.cli.evaluation_contexts import ContextOptions, context_from, parse
from papa.cli.options import use_one_thread
from papa.cli.tables import print_table, printable
from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.runs import RunDirectory, is_run, member_files

if TYPE_CHECKING:
    from papa.files import FileSoup

DESCRIPTION = """Averages the weights in several files into one network, block by block: memory use stays small.

Takes safetensors files; sharded ones by their index or directory; PyTorch files that hold a state dict, directly or
under state_dict, model_state_dict, model or ema; distributed checkpoints. Run directories of papa,
directories that Accelerate saved several models to and files of a wrapper with several networks stand for all of them.

examples:
  papa soup a.safetensors b.safetensors c.safetensors -o soup.safetensors
  papa soup a.pt b.pt -o soup.safetensors --weights 0.7,0.3 --dtype bfloat16
  papa soup sweep/*.pt -o soup.safetensors --greedy --score "python evaluate.py {}"
  papa soup a.safetensors b.safetensors -o soup.safetensors --stock pretrained.safetensors
  papa soup a.safetensors b.safetensors -o soup.safetensors --learned --factory my_data:make
  papa soup vgg/*.pt -o soup.safetensors --factory my_data:make --reset-batch-norm
  papa soup hub/model-a hub/model-b -o merged --max-shard-size 2GB"""


@dataclass(frozen=True, kw_only=True)
class SoupOptions(ContextOptions):
    """Options of `papa soup`."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The files."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The output: a file that ends in .safetensors, or a directory."""
    weights: str | None = None
    """One weight for each file, separated by commas, summing to 1; None for equal weights."""
    dtype: str | None = None
    """What floating-point tensors are stored in (float32, bfloat16, float16, float64); None for that of the first
    file."""
    greedy: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Add files best first, as long as the score does not get worse."""
    score: str | None = None
    """A command in which {} stands for a safetensors file; the last number it prints is the score, higher is better. It
    is not run by a shell: for pipes use sh -c '...'. Without it, the recipe's validation data or the factory's score
    is used."""
    lower_is_better: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A lower score is better, as a loss is."""
    learned: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Choose the weights that minimise the cross-entropy on the factory's batches of inputs and targets."""
    stock: Path | None = None
    """What all files were fine-tuned from; the mean is moved back toward it tensor by tensor (Model Stock)."""
    reset_batch_norm: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Estimate the BatchNorm statistics of averages again."""
    max_shard_size: str = "5GB"
    """Write several files and an index if the soup is larger."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing output."""


def main(arguments: Sequence[str]) -> int:
    options, config = parse(SoupOptions, arguments, prog="papa soup", description=DESCRIPTION)
    if not options.paths:
        raise ConfigError("no file was named, expected files or directories: see papa soup --help")
    if config is None and options.factory is None:
        _check_needs_no_network(options)
    from papa.files import soup_files  # imports torch, which help does without
    from papa.lab.signals import leaving

    weights = None if options.weights is None else split_weights(options.weights)
    paths = [file for path in options.paths for file in (member_files(path) if is_run(path) else [path])]
    use_one_thread()
    with leaving(), _byte_progress() as bar:
        writing = bar.add_task("", total=None, visible=False)
        soup = soup_files(
            paths,
            options.out,
            weights,
            dtype=options.dtype,
            key=options.key,
            greedy=options.greedy,
            score=options.score,
            higher_is_better=not options.lower_is_better,
            learned=options.learned,
            stock=options.stock,
            evaluation_context=context_from(options, config),
            reset_batch_norm=options.reset_batch_norm,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            on_progress=lambda done, total: bar.update(writing, completed=done, total=total, visible=True),
            on_score=print_score,
        )
    print_soup(soup)
    for note in [*soup.notes, *_seen_by_training(options, config)]:
        print(printable(f"note: {note}"))
    return 0


def split_weights(text: str) -> list[float]:
    """Parse weights separated by commas."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights is '{text}', expected numbers such as 0.5,0.3,0.2") from error


def _check_needs_no_network(options: SoupOptions) -> None:
    if options.reset_batch_norm or options.learned:
        raise ConfigError(
            "resetting BatchNorm and learned weights need a network and data: give --recipe NAME, or --factory "
            "package.module:function that returns (network, batches)"
        )
    if options.greedy and options.score is None:
        raise ConfigError(
            "a greedy soup needs scores: give a --score command that prints a number for the file {}, --recipe NAME, "
            "or --factory"
        )


def print_score(files: Sequence[Path], score: float) -> None:
    """Print the score of a candidate as soon as it is known, since scoring takes long."""
    print(f"scored {score:.6g}: {', '.join(map(str, files))}", file=sys.stderr, flush=True)


def print_soup(soup: FileSoup) -> None:
    """Print the members of a soup, the trials of a greedy soup, and the path of the soup."""
    columns = {
        "": [str(number) for number, _ in enumerate(soup.members, start=1)],
        "weight": [f"{one.weight:.4g}" if one.weight else "left out" for one in soup.members],
        "score": ["" if one.score is None else f"{one.score:.6g}" for one in soup.members],
        "file": [str(one.path) for one in soup.members],
    }
    used = {name: cells for name, cells in columns.items() if any(cells)}
    print_table(tuple(used), list(zip(*used.values(), strict=True)))
    if soup.trials:
        print()
        tried = [
            (
                "kept" if trial.kept else "left",
                f"{trial.score:.6g}",
                ", ".join(str(index + 1) for index in trial.members),
            )
            for trial in soup.trials
        ]
        print_table(("", "score", "average of"), tried)
    if soup.score is not None:
        print(f"\nscore of the greedy soup: {soup.score:.6g}")
    print(f"\none network: {soup.path}" + (f" ({len(soup.files) - 1} shards)" if len(soup.files) > 1 else ""))


def _seen_by_training(options: SoupOptions, config: Config | None) -> list[str]:
    """Notes about runs that trained on validation data: another seed holds out other examples."""
    if config is None or not options.greedy or options.score is not None:
        return []
    notes = []
    for path in options.paths:
        if is_run(path):
            seed = RunDirectory(path).read_config().get("seed")
            if seed != config.seed:
                notes.append(
                    f"{path} was trained with seed {seed}, and thus on some of the examples that seed {config.seed} "
                    "holds out: its scores are too high"
                )
    return notes


def _byte_progress() -> rich.progress.Progress:
    """A progress bar of the bytes written, on terminals only."""
    console = Console(stderr=True)
    return rich.progress.Progress(
        rich.progress.TextColumn("writing"),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
