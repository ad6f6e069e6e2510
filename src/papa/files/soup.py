"""`papa.soup_files`: one network from the weights in several files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from papa.core import mixing
from papa.core.soups import GreedySoup, greedy_soup, learned_weights
from papa.errors import ConfigError, SoupError, did_you_mean
from papa.evaluation.scores import Evaluation
from papa.files.average import StockAverage, check_same_architecture
from papa.files.builder import ScoreFile, Scorer, SoupBuilder, SoupSteps
from papa.files.evaluation_context import evaluation_context_of
from papa.files.hub import CARD, companions
from papa.files.opening import open_all, open_weights
from papa.files.output import Output
from papa.files.record import SoupMember, digest_of, dtype_name, greedy_record, soup_notes, soup_record
from papa.files.scores import ScoreMemory
from papa.files.weights import PathLike, WeightsFile
from papa.files.writing import FileSoup, OnProgress, Writing
from papa.storage import json_text
from papa.storage.tensors import DTYPE_NAMES

OUTPUT_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

OnScore = Callable[[Sequence[Path], float], object]
"""Called with the files of a candidate and its score."""


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
    higher_is_better: bool = True,
    learned: bool = False,
    stock: PathLike | None = None,
    evaluation_context: Any = None,
    align: bool = False,
    repair: bool = False,
    reset_batch_norm: bool = False,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    full_digests: bool = False,
    names: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
    on_score: OnScore | None = None,
) -> FileSoup:
    """Average the weights in several files into one file, without loading any of them.

        soup = sum_j w_j file_j,   w_j = 1/n unless given

    Numbers are read, averaged (in float32 or wider) and written block by block. Integer tensors are copied from the
    first file with a weight. The output appears when it is complete, with a `.json` next to it that records what it was
    made of; its metadata holds the same. If the first file is in a folder of a model hub and the output is a directory,
    config and tokenizer files are copied and a model card is written.

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
        paths: safetensors files, indices of sharded ones or their directories, PyTorch files that hold a state dict,
            distributed checkpoints; and what stands for several networks: directories that Accelerate
            saved several models to, files of a wrapper with several networks.
        out: a file that ends in .safetensors, or a directory.
        weights: one for each file, non-negative and summing to 1.
        normalize: divide the weights by their sum.
        dtype: what floating-point tensors are stored in; None for that of the first file.
        key: the place of the weights in a file, names joined by dots, such as "ema" or "model.members.0"; "members.*"
            for each of several networks, "." for all as one. None to search the usual names.
        greedy: add files best first, as long as the score does not get worse (`papa.greedy_soup`).
        score: how candidates are scored: a command in which `{}` stands for the file and whose last printed number
            counts, or a function of the file. None to score in the evaluation context.
        higher_is_better: whether a higher `score` is better; for the evaluation context it says so itself.
        learned: choose the weights that minimise the cross-entropy on the context's batches (`papa.learned_soup`).
        stock: a file that all others were fine-tuned from; the soup is their mean, moved back toward it tensor by
            tensor (`papa.model_stock`).
        evaluation_context: a `papa.files.EvaluationContext` (a network and data), a function that makes one or returns
            `(network, batches)`, or its name `package.module:function`.
        align: permute each network's units to match those of the first, by their activations on the context's batches.
        repair: give averages the activation statistics of their members (`papa.repair_`).
        reset_batch_norm: estimate the BatchNorm statistics of averages again (`papa.reset_batch_norm_`).
        max_shard_size: write several files and an index if the soup is larger, in bytes or such as "5GB".
        overwrite: replace an existing output.
        full_digests: record the SHA-256 of every byte of the inputs, also of large files.
        names: what the record and messages call each network, where files are temporary; None for their paths.
        on_progress: called with the number of bytes written and the total.
        on_score: called with the files of a candidate and its score.

    Returns:
        The path of the soup, its members, and every score tried. After an error nothing is left behind.
    """
    max_bytes, stored = parse_size(max_shard_size), _dtype_of(dtype)
    if score is not None and not greedy:
        raise ConfigError("a score is only used by a greedy soup, and none was requested: leave out the score")
    steps = SoupSteps(align=align, repair=repair, reset_batch_norm=reset_batch_norm)
    _check_one_kind(weights, greedy=greedy, learned=learned, stock=stock, align=align)
    files = _open_checked(paths, key)
    if names is not None:
        if len(names) != len(files):
            raise ConfigError(f"there are {len(names)} names, expected one for each of {len(files)} networks")
        for file, name in zip(files, names, strict=True):
            file.path = Path(name)
    writing = Writing(max_bytes=max_bytes, overwrite=overwrite, full_digests=full_digests, on_progress=on_progress)
    check_same_architecture(files)
    output = Output(out)
    row, merge, base = checked_weights(weights, len(files), normalize=normalize), None, None
    if stock is not None:
        if len(files) < 2:
            raise ConfigError(f"Model Stock compares networks, got {len(files)}, expected at least two")
        base = open_weights(stock, key=key)
        check_same_architecture([*files, base])
        merge = StockAverage(files, base)
    context = None if evaluation_context is None else evaluation_context_of(evaluation_context)
    builder = SoupBuilder(files, output.scratch, dtype=stored, context=context, steps=steps, merge=merge)
    if learned:
        _ = builder.context
    scorer = Scorer(builder, score) if greedy else None
    notes = soup_notes(files, stored)
    if output.is_directory:
        beside, more = companions(files, None if stored is None else dtype_name(stored))
        output.add({**beside, CARD: b""} if beside else {})
        notes += more
    output.prepare(overwrite=overwrite)
    try:
        digests = [digest_of(file, full=full_digests or greedy) for file in files]
        alignments = builder.align() if align else [None] * len(files)
        choice, learning = None, None
        scores: Sequence[float | None] = [None] * len(files)
        if scorer is not None:
            memory = ScoreMemory(output.scores)
            conditions = _conditions(builder, scorer, stored, digests)
            is_higher_better = higher_is_better if score is not None else builder.context.higher_is_better
            choice = _choose(scorer, files, digests, memory, conditions, on_score, is_higher_better)
            row, scores = choice.network["row"].tolist(), choice.member_scores
            if memory.num_used:
                notes.append(f"{memory.num_used} scores are from an earlier call that was interrupted")
        if learned:
            learning = learned_weights(builder.slope, len(files), len(builder.context.batches), num_epochs=5, lr=0.1)
            row = learning.weights.tolist()
        members = tuple(map(SoupMember, [file.path for file in files], digests, row, scores, alignments))
        record = soup_record(members, builder.tensors, stored, steps)
        if choice is not None and scorer is not None:
            record["greedy"] = greedy_record(members, choice, scorer.name)
        if learning is not None:
            record["learned"] = {"loss": learning.loss, "losses": list(learning.losses)}
            notes.append(f"the held-out loss is {learning.loss:.6g}, of equal weights {learning.losses[0]:.6g}")
        if base is not None:
            record["method"] = {"name": "model_stock"}
            record["base"] = {"path": str(base.path), "digest": digest_of(base, full=full_digests)}
        written = writing(output, builder.tensors, builder.blocks(row), members, record, notes, library="transformers")
        if scorer is not None:
            memory.forget()
    finally:
        output.clean_up()
    best, trials = (None, ()) if choice is None else (choice.score, choice.trials)
    return FileSoup(written[-1], tuple(written), members, best, trials, tuple(notes))


def _check_one_kind(
    weights: Sequence[float] | None, *, greedy: bool, learned: bool, stock: PathLike | None, align: bool
) -> None:
    """Raise a `ConfigError` for choices that contradict each other."""
    if greedy and weights is not None:
        raise ConfigError("a greedy soup weights its members equally: give weights, or choose a greedy soup")
    kinds = {
        "given weights": weights is not None,
        "greedy": greedy,
        "learned": learned,
        "Model Stock": stock is not None,
    }
    chosen = [name for name, is_chosen in kinds.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(f"a soup has one way to choose its weights, got {' and '.join(chosen)}: leave out the others")
    if align and stock is not None:
        raise ConfigError("networks that were fine-tuned from one start are aligned already: leave out the alignment")


def checked_weights(weights: Sequence[float] | None, size: int, *, normalize: bool) -> list[float]:
    """One weight for each of `size` files, non-negative and summing to 1."""
    if weights is None:
        if normalize:
            raise ConfigError("there are no weights to normalize: give weights, or do not normalize")
        return [1.0 / size] * size
    row = torch.tensor(list(weights), dtype=torch.float64)
    if len(row) != size:
        raise SoupError(f"there are {len(row)} weights for {size} files, expected one for each")
    if not torch.isfinite(row).all() or (row < 0).any() or not row.any():
        raise SoupError(f"the weights are {row.tolist()}, expected finite numbers, none below 0 and some above it")
    total = float(row.sum())
    if not normalize and abs(total - 1.0) > mixing.ROW_SUM_TOLERANCE:
        raise SoupError(f"the weights sum to {total:.6g}, expected 1: correct them, or normalize them")
    values: list[float] = (row / total).tolist()
    return values


def _open_checked(paths: Sequence[PathLike], key: str | None) -> list[WeightsFile]:
    files = open_all(paths, key=key)
    if not files:
        raise SoupError("a soup needs at least one file of weights, got none")
    for name, info in files[0].tensors.items():
        if info.dtype not in DTYPE_NAMES:
            raise SoupError(f"{files[0].path} has '{name}' of {dtype_name(info.dtype)}, which safetensors cannot hold")
    return files


def _choose(
    scorer: Scorer,
    files: Sequence[WeightsFile],
    digests: Sequence[str],
    memory: ScoreMemory,
    conditions: str,
    on_score: OnScore | None,
    higher_is_better: bool,
) -> GreedySoup[dict[str, Any]]:
    """A greedy soup of rows instead of networks: the mean of some rows of the identity is the soup's row of weights."""

    def score(state: dict[str, Any]) -> Evaluation:
        row: list[float] = state["row"].tolist()
        used = [index for index, weight in enumerate(row) if weight]
        identity = json_text([conditions, [(digests[index], row[index]) for index in used]])
        name = hashlib.sha256(identity.encode()).hexdigest()
        known = memory.get(name)
        paths = [files[index].path for index in used]
        if known is None:
            try:
                known = scorer(row)
            except SoupError as error:  # it names a temporary file
                raise SoupError(f"{', '.join(map(str, paths))} could not be scored: {error}") from error
            memory.put(name, known, list(map(str, paths)))
        if on_score is not None:
            on_score(paths, known.score)
        return known

    return greedy_soup([{"row": row} for row in mixing.identity(len(files))], score, higher_is_better=higher_is_better)


def _conditions(builder: SoupBuilder, scorer: Scorer, dtype: torch.dtype | None, digests: Sequence[str]) -> str:
    """What a score depends on besides the files that are averaged."""
    steps = builder.steps
    reference = digests[0] if steps.align else ""
    context = builder.context.name if steps.align or steps.changes_average else ""
    return json_text([scorer.name, str(dtype), steps.repair, steps.reset_batch_norm, reference, context])


def parse_size(size: int | str) -> int:
    """A number of bytes.

    Example:
        >>> parse_size("5GB"), parse_size("300 MB"), parse_size(1000)
        (5000000000, 300000000, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B|)", str(size).strip(), re.IGNORECASE)
    num_bytes = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if num_bytes < 1:
        raise ConfigError(f"the size of a shard is '{size}', expected a size such as 5GB or 300MB")
    return num_bytes


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is None:
        return None
    if name not in OUTPUT_DTYPES:
        raise ConfigError(f"the dtype is {name}: {did_you_mean(name, OUTPUT_DTYPES)}")
    return OUTPUT_DTYPES[name]
