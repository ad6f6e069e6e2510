"""`papa.soup_files`: one network from checkpoints that lie in files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from papa import mixing
from papa._version import __version__
from papa.align import Alignment
from papa.checkpoint import json_text
from papa.errors import ConfigError, SoupError, did_you_mean
from papa.evaluation import Evaluation
from papa.files.average import check_alike, is_averaged
from papa.files.builder import ScoreFile, Scorer, SoupBuilder, Steps, Tell, Watch
from papa.files.digests import digest_of
from papa.files.evaluation_context import evaluation_context_of
from papa.files.header import NAMES
from papa.files.scores import Memory
from papa.files.sources import Checkpoint, PathLike, open_checkpoints
from papa.files.writing import Output, write_output
from papa.soup import GreedySoup, Trial, greedy_soup

OUTPUT_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Ingredient:
    """One checkpoint of a soup."""

    path: Path
    digest: str
    """Which file it was; see `papa.files.digest_of`."""
    weight: float
    """Its share of the soup; 0 for one that a greedy soup left out."""
    score: float | None
    """What it scored alone, for a greedy soup."""
    alignment: Alignment | None
    """How well its units matched the first's, where it was aligned."""


@dataclass(frozen=True)
class FileSoup:
    """A soup that was written, and how it came about."""

    path: Path
    """What to load: the file, or the index where there are several."""
    files: tuple[Path, ...]
    """All files of the soup."""
    ingredients: tuple[Ingredient, ...]
    """What went in, in the order given."""
    score: float | None
    """A greedy soup's score."""
    trials: tuple[Trial, ...]
    """Every candidate of a greedy soup, in the order tried."""
    notes: tuple[str, ...]
    """What a user should know: what was not averaged, which dtype was chosen."""

    @property
    def weights(self) -> tuple[float, ...]:
        """Each checkpoint's share."""
        return tuple(ingredient.weight for ingredient in self.ingredients)


def soup_files(
    paths: Sequence[PathLike],
    out: PathLike,
    weights: Sequence[float] | None = None,
    *,
    normalize: bool = False,
    dtype: torch.dtype | str | None = None,
    key: str | None = None,
    greedy: bool = False,
    score: str | ScoreFile | None = None,
    evaluation_context: Any = None,
    align: bool = False,
    repair: bool = False,
    reset_batch_norm: bool = False,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    full_digests: bool = False,
    watch: Watch | None = None,
    tell: Tell | None = None,
) -> FileSoup:
    """Average checkpoints into one, without loading any of them.

        soup = sum_j w_j file_j,   w_j = 1/n unless given

    Numbers are read, averaged (in float32 or better) and written a block at a time. Tensors of whole numbers are taken
    from the first file that has a share. The output appears when it is complete, with a `.json` beside it that says
    what it was made of; the same stands in its metadata.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file, save_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> for index in range(2):
        ...     save_file({"weight": torch.full((3,), float(index))}, folder / f"{index}.safetensors")
        >>> soup = soup_files([folder / "0.safetensors", folder / "1.safetensors"], folder / "soup.safetensors")
        >>> load_file(soup.path)["weight"]
        tensor([0.5000, 0.5000, 0.5000])

    Args:
        paths: safetensors files, indices of sharded ones or the directories they lie in, PyTorch files that hold a
            state dict, run directories of papa (which stand for all their members).
        out: a file that ends in .safetensors, or a directory.
        weights: one for each checkpoint, non-negative and summing to 1.
        normalize: divide the weights by their sum.
        dtype: what floating-point tensors are stored in; None for the first file's.
        key: where in PyTorch files the state dict is; None to look under the usual names.
        greedy: add checkpoints best first, as long as the score does not fall (`papa.greedy_soup`).
        score: how candidates are scored: a command in which `{}` stands for the file and whose last printed number
            counts, or a function of the file; higher is better. None to score in the evaluation_context.
        evaluation_context: a `papa.files.EvaluationContext` (a network and data), a function that makes one or returns
            `(network, batches)`, or its name `package.module:function`.
        align: permute each network's units to match the first's, by their activations on the evaluation_context's batches.
        repair: give averages the activation statistics of their parents (`papa.repair_`).
        reset_batch_norm: estimate averages' BatchNorm statistics anew (`papa.reset_batch_norm_`).
        max_shard_size: write several files and an index when the soup is larger, in bytes or such as "5GB".
        overwrite: replace an output that is there.
        full_digests: the SHA-256 of every byte of the inputs, also where they are large.
        watch: told how many bytes of how many are written.
        tell: told which files were averaged and how they scored, as soon as it is known.

    Returns:
        Where the soup is, what went in, and every score tried. When anything goes wrong nothing is left behind.
    """
    output = Output(out)
    most_bytes = parse_size(max_shard_size)
    stored = _dtype_of(dtype)
    if greedy and weights is not None:
        raise ConfigError("a greedy soup weights what it chooses alike: give weights, or ask for a greedy soup")
    if score is not None and not greedy:
        raise ConfigError("a score is only used by a greedy soup: ask for one with --greedy")
    checkpoints = open_checkpoints(paths, key=key)
    if not checkpoints:
        raise SoupError("a soup needs at least one checkpoint, got none")
    check_alike(checkpoints)
    _check_storable(checkpoints[0])
    row = checked_weights(weights, len(checkpoints), normalize=normalize)
    place = None if evaluation_context is None else evaluation_context_of(evaluation_context)
    steps = Steps(align=align, repair=repair, reset_batch_norm=reset_batch_norm)
    builder = SoupBuilder(checkpoints, output.workshop, dtype=stored, evaluation_context=place, steps=steps)
    scorer = Scorer(builder, score) if greedy else None
    output.check(overwrite=overwrite)
    try:
        digests = [digest_of(checkpoint, full=full_digests or greedy) for checkpoint in checkpoints]
        alignments = builder.align() if align else [None] * len(checkpoints)
        choice, memory = None, Memory(output.scores) if greedy else None
        if scorer is not None and memory is not None:
            how = _how(builder, scorer, stored, digests)
            choice = _choose(scorer, digests, checkpoints, memory, how, tell)
            row = choice.network["row"].tolist()
        scores = [None] * len(row) if choice is None else choice.member_scores
        paths_given = [checkpoint.path for checkpoint in checkpoints]
        ingredients = tuple(map(Ingredient, paths_given, digests, row, scores, alignments))
        record = _record(ingredients, builder, stored, choice, scorer)
        notes = _notes(checkpoints, stored)
        if memory is not None and memory.num_used:
            notes.append(f"{memory.num_used} scores are of an earlier call that was broken off")
        files = write_output(
            output,
            builder.tensors,
            _watched(builder, row, watch),
            metadata={"format": "pt", "papa": __version__, "soup": json_text(record)},
            sidecar=json_text({**record, "notes": notes}, indent=2) + "\n",
            most_bytes=most_bytes,
        )
        if memory is not None:
            memory.forget()
    finally:
        output.remove_partial()
    found, trials = (None, ()) if choice is None else (choice.score, choice.trials)
    return FileSoup(files[-1], tuple(files), ingredients, found, trials, tuple(notes))


def _choose(
    scorer: Scorer,
    digests: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    memory: Memory,
    how: str,
    tell: Tell | None,
) -> GreedySoup[dict[str, Any]]:
    """A greedy soup of rows instead of networks: the mean of some rows of the identity is the soup's row of weights."""

    def score(state: dict[str, Any]) -> Evaluation:
        row: list[float] = state["row"].tolist()
        used = [index for index, weight in enumerate(row) if weight]
        identity = json_text([how, [(digests[index], row[index]) for index in used]])
        name = hashlib.sha256(identity.encode()).hexdigest()
        known = memory.get(name)
        files = [checkpoints[index].path for index in used]
        if known is None:
            try:
                known = scorer(row)
            except SoupError as error:  # which names a file that was made to be scored
                raise SoupError(f"{', '.join(map(str, files))} could not be scored: {error}") from error
            memory.put(name, known, list(map(str, files)))
        if tell is not None:
            tell(files, known.score)
        return known

    size = len(checkpoints)
    return greedy_soup([{"row": row} for row in mixing.identity(size)], score)


def _how(builder: SoupBuilder, scorer: Scorer, dtype: torch.dtype | None, digests: Sequence[str]) -> str:
    """What a score depends on besides the files that are averaged."""
    steps = builder.steps
    reference = digests[0] if steps.align else ""
    evaluation_context = (
        builder.evaluation_context.name
        if builder.evaluation_context is not None and (steps.align or steps.after)
        else ""
    )
    return json_text([scorer.name, str(dtype), steps.repair, steps.reset_batch_norm, reference, evaluation_context])


def _record(
    ingredients: Sequence[Ingredient],
    builder: SoupBuilder,
    dtype: torch.dtype | None,
    choice: GreedySoup[Any] | None,
    scorer: Scorer | None,
) -> dict[str, Any]:
    """What a soup was made of, as its metadata and its sidecar hold it."""
    files = []
    for one in ingredients:
        entry: dict[str, Any] = {"path": str(one.path), "digest": one.digest, "weight": one.weight}
        if one.score is not None:
            entry["score"] = one.score
        if one.alignment is not None:
            entry["alignment"] = {"before": one.alignment.before, "after": one.alignment.after}
        files.append(entry)
    record: dict[str, Any] = {
        "format": 1,
        "papa": __version__,
        "torch": torch.__version__,
        "files": files,
        "align": builder.steps.align,
        "repair": builder.steps.repair,
        "reset_batch_norm": builder.steps.reset_batch_norm,
        "dtype": None if dtype is None else _name(dtype),
        "not_averaged": [name for name, info in builder.tensors.items() if not is_averaged(info.dtype)],
    }
    if choice is not None and scorer is not None:
        paths = [str(one.path) for one in ingredients]
        record["greedy"] = {
            "scored_by": scorer.name,
            "score": choice.score,
            "members": [paths[index] for index in choice.members],
            "trials": [
                {"files": [paths[index] for index in trial.members], "score": trial.score, "kept": trial.kept}
                for trial in choice.trials
            ],
        }
    return record


def _notes(checkpoints: Sequence[Checkpoint], dtype: torch.dtype | None) -> list[str]:
    first = checkpoints[0]
    told: dict[str, list[Path]] = {}
    for checkpoint in checkpoints:
        for note in checkpoint.notes:
            told.setdefault(note, []).append(checkpoint.path)
    notes = [f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {note}" for note, paths in told.items()]
    whole = [name for name, info in first.tensors.items() if not is_averaged(info.dtype)]
    if whole:
        count = "1 tensor" if len(whole) == 1 else f"{len(whole)} tensors"
        notes.append(
            f"not averaged but taken from the first file that has a weight: {count} of whole numbers, "
            f"such as '{whole[0]}'"
        )
    kinds = [{_name(info.dtype) for info in one.tensors.values() if is_averaged(info.dtype)} for one in checkpoints]
    if dtype is None and any(kind != kinds[0] for kind in kinds):
        notes.append(f"the files differ in dtype: written in the first's, {', '.join(sorted(kinds[0]))}")
    seen: set[tuple[Path, ...]] = set()
    for checkpoint in checkpoints:
        real = tuple(file.resolve() for file in checkpoint.files)
        if real in seen:
            notes.append(f"{checkpoint.path} was given more than once, and counts as often")
        seen.add(real)
    return notes


def _watched(builder: SoupBuilder, row: Sequence[float], watch: Watch | None) -> Callable[[str], Iterator[Tensor]]:
    blocks = builder.blocks(row)
    if watch is None:
        return blocks
    total, done = sum(info.num_bytes for info in builder.tensors.values()), 0

    def counted(name: str) -> Iterator[Tensor]:
        nonlocal done
        for block in blocks(name):
            yield block
            done += block.numel() * block.dtype.itemsize
            watch(done, total)

    return counted


def checked_weights(weights: Sequence[float] | None, size: int, *, normalize: bool) -> list[float]:
    """One weight for each of `size` checkpoints, non-negative and summing to 1."""
    if weights is None:
        if normalize:
            raise ConfigError("there are no weights to normalize: give --weights")
        return [1.0 / size] * size
    row = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
    if len(row) != size:
        raise SoupError(f"there are {len(row)} weights for {size} checkpoints, expected one for each")
    if not torch.isfinite(row).all() or (row < 0).any() or not row.any():
        raise SoupError(f"the weights are {row.tolist()}, expected finite numbers, none below 0 and some above it")
    total = float(row.sum())
    if not normalize and abs(total - 1.0) > mixing.ROW_SUM_TOLERANCE:
        raise SoupError(f"the weights sum to {total:.6g}, expected 1: correct them, or divide by the sum: --normalize")
    values: list[float] = (row / total).tolist()
    return values


def parse_size(size: int | str) -> int:
    """A number of bytes.

    Example:
        >>> parse_size("5GB"), parse_size("300 MB"), parse_size(1000)
        (5000000000, 300000000, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B|)", str(size).strip(), re.IGNORECASE)
    num_bytes = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if num_bytes < 1:
        raise ConfigError(f"the size of a shard is '{size}', expected such as 5GB or 300MB")
    return num_bytes


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    name = _name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is None:
        return None
    if name not in OUTPUT_DTYPES:
        raise ConfigError(f"--dtype is {name}: {did_you_mean(name, OUTPUT_DTYPES)}")
    return OUTPUT_DTYPES[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_storable(checkpoint: Checkpoint) -> None:
    for name, info in checkpoint.tensors.items():
        if info.dtype not in NAMES:
            raise SoupError(f"{checkpoint.path} has '{name}' of {_name(info.dtype)}, which safetensors cannot hold")
