"""`papa.soup_files`: one network from the weights in several files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa._version import __version__
from papa.core import mixing
from papa.core.soups import GreedySoup, greedy_soup
from papa.errors import ConfigError, SoupError, did_you_mean
from papa.evaluation.scores import Evaluation
from papa.files.average import BLOCK, average, check_same_architecture, in_dtypes, is_averaged, ranges, stock_average
from papa.files.evaluation_context import evaluation_context_of, load_
from papa.files.learned import learned_weights, loss_and_gradients
from papa.files.output import Output
from papa.files.record import FileSoup, SoupMember, digest_of, dtype_name, soup_notes
from papa.files.score_command import score_command
from papa.files.weights import PathLike, WeightsFile, open_all, open_weights
from papa.repair import reset_batch_norm_
from papa.storage import file_errors, json_text
from papa.storage.tensors import DTYPE_NAMES, Blocks, TensorInfo, write_tensors

OUTPUT_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

OnProgress = Callable[[int, int], object]
"""Called with the number of bytes written and the total."""
OnScore = Callable[[Sequence[Path], float], object]
"""Called with the files of a candidate and its score."""


def soup_files(
    paths: Sequence[PathLike],
    out: PathLike,
    weights: Sequence[float] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    key: str | None = None,
    greedy: bool = False,
    score: str | Callable[[Path], float] | None = None,
    higher_is_better: bool = True,
    learned: bool = False,
    stock: PathLike | None = None,
    evaluation_context: Any = None,
    reset_batch_norm: bool = False,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    names: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
    on_score: OnScore | None = None,
) -> FileSoup:
    """Average the weights in several files into one file, without loading any of them.

        soup = sum_j w_j file_j,   w_j = 1/n unless given

    Numbers are read, averaged (in float32 or wider) and written block by block. Integer tensors are copied from the
    first file with a weight. The output appears when it is complete, with a `.json` next to it that records what it was
    made of; its metadata holds the same.

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
            distributed checkpoints; and what stands for several networks: directories that Accelerate saved several
            models to, files of a wrapper with several networks.
        out: a file that ends in .safetensors, or a directory.
        weights: one for each file, non-negative and summing to 1.
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
        reset_batch_norm: estimate the BatchNorm statistics of averages again (`papa.reset_batch_norm_`).
        max_shard_size: write several files and an index if the soup is larger, in bytes or such as "5GB".
        overwrite: replace an existing output.
        names: what the record and messages call each network, where files are temporary; None for their paths.
        on_progress: called with the number of bytes written and the total.
        on_score: called with the files of a candidate and its score.

    Returns:
        The path of the soup, its members, and every score tried. After an error nothing is left behind.
    """
    max_bytes, name = parse_size(max_shard_size), dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is not None and name not in OUTPUT_DTYPES:
        raise ConfigError(f"the dtype is {name}: {did_you_mean(name, OUTPUT_DTYPES)}")
    stored = None if name is None else OUTPUT_DTYPES[name]
    score_file = score_command(score) if isinstance(score, str) else score
    ways = [("given weights", weights is not None), ("greedy", greedy), ("learned", learned), ("Model Stock", stock)]
    chosen = [name for name, is_chosen in ways if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(f"a soup has one way to choose its weights, got {' and '.join(chosen)}: leave out the others")
    if score is not None and not greedy:
        raise ConfigError("a score is only used by a greedy soup, and none was requested: leave out the score")
    files, base = open_all(paths, key=key), None if stock is None else open_weights(stock, key=key)
    _check_files(files, base, names)
    row = _checked_weights(weights, len(files))
    tensors = {  # as in the first file, unless a dtype was chosen
        name: TensorInfo(stored, info.shape) if stored is not None and info.dtype.is_floating_point else info
        for name, info in files[0].tensors.items()
    }
    context = None if evaluation_context is None else evaluation_context_of(evaluation_context)
    if context is None and (reset_batch_norm or learned or (greedy and score is None)):
        raise ConfigError(
            "a greedy soup needs scores, and resetting BatchNorm and learned weights need a network and data: give an "
            "evaluation context, or a function package.module:function that returns (network, batches); or to a greedy "
            "soup a score command, or a function of the file"
        )

    def in_network(row: Sequence[float]) -> nn.Module:
        assert context is not None
        load_(context.network, average(files, row) if base is None else stock_average(files, base), files[0])
        if reset_batch_norm and (sum(map(bool, row)) > 1 or len(row) == 1):  # one of several has its own statistics
            reset_batch_norm_(context.network, context.batches)
        return context.network

    def blocks(row: Sequence[float]) -> Blocks:
        if reset_batch_norm:
            state = in_network(row).state_dict()
            return in_dtypes(lambda name: state[name].detach().cpu().reshape(-1).split(BLOCK), tensors)
        return in_dtypes(average(files, row) if base is None else stock_average(files, base), tensors)

    def score_row(state: dict[str, Tensor]) -> Evaluation:
        row: list[float] = state["row"].tolist()
        used = [file.path for file, weight in zip(files, row, strict=True) if weight]
        try:
            if context is not None and score_file is None:
                found = context.evaluate(in_network(row))
            else:
                candidate = output.scratch / "candidate.safetensors"
                with file_errors(candidate, "write", error=SoupError):
                    candidate.parent.mkdir(parents=True, exist_ok=True)
                    write_tensors(candidate, tensors, blocks(row), metadata={"format": "pt"})
                found = Evaluation(float(score_file(candidate)), math.nan)  # type: ignore[misc]
        except SoupError as error:  # it names a temporary file
            raise SoupError(f"{', '.join(map(str, used))} could not be scored: {error}") from error
        if on_score is not None:
            on_score(used, found.score)
        return found

    def slope(weights: Tensor, batch: int) -> tuple[float, Tensor]:
        """The loss of a soup on a batch, and its derivative by each weight."""
        assert context is not None
        loss, gradients = loss_and_gradients(in_network(weights.tolist()), context.batches[batch], F.cross_entropy)
        products = torch.zeros(len(files), dtype=torch.float64)
        for name, gradient in gradients.items():
            for index, file in enumerate(files):
                for start, stop in ranges(gradient.numel()):
                    part = gradient.reshape(-1)[start:stop].cpu().double()
                    products[index] += torch.dot(part, file.part(name, start, stop).double())
        return loss, products

    output, notes = Output(out, overwrite=overwrite), soup_notes(files, stored)
    choice: GreedySoup[Any] | None = None
    made: dict[str, Any] = {}
    with output:
        digests = [digest_of(file) for file in files]
        if greedy:
            scorer = score if isinstance(score, str) else getattr(score, "__qualname__", type(score).__name__)
            if context is not None and score is None:
                scorer, higher_is_better = context.name, context.higher_is_better
            # A greedy soup of rows instead of networks: a mean of rows of the identity is the soup's row of weights.
            rows = [{"row": row} for row in mixing.identity(len(files))]
            choice = greedy_soup(rows, score_row, higher_is_better=higher_is_better)
            row = choice.network["row"].tolist()
            made["greedy"] = {
                "scored_by": scorer,
                "score": choice.score,
                "members": [str(files[index].path) for index in choice.members],
                "trials": [
                    {
                        "files": [str(files[index].path) for index in trial.members],
                        "score": trial.score,
                        "kept": trial.kept,
                    }
                    for trial in choice.trials
                ],
            }
        if learned and context is not None:
            learning = learned_weights(slope, len(files), len(context.batches), num_epochs=5, lr=0.1)
            row = learning.weights.tolist()
            made["learned"] = {"loss": learning.loss, "losses": list(learning.losses)}
            notes.append(f"the held-out loss is {learning.loss:.6g}, of equal weights {learning.losses[0]:.6g}")
        if base is not None:
            made["stock"] = {"path": str(base.path), "digest": digest_of(base)}
        scores = [None] * len(files) if choice is None else choice.member_scores
        members = tuple(map(SoupMember, [file.path for file in files], digests, row, scores))
        record = {
            **{"format": 1, "papa": __version__, "torch": torch.__version__},
            "files": [member.to_json() for member in members],
            "reset_batch_norm": reset_batch_norm,
            "dtype": None if stored is None else dtype_name(stored),
            "not_averaged": [name for name, info in tensors.items() if not is_averaged(info.dtype)],
            **made,
        }
        written = output.write(
            tensors,
            _with_progress(blocks(row), tensors, on_progress),
            metadata={"format": "pt", "papa": __version__, "soup": json_text(record)},
            sidecar=json_text({**record, "notes": notes}, indent=2) + "\n",
            max_bytes=max_bytes,
        )
    best, trials = (None, ()) if choice is None else (choice.score, choice.trials)
    return FileSoup(written[-1], written, members, best, trials, tuple(notes))


def _check_files(files: Sequence[WeightsFile], base: WeightsFile | None, names: Sequence[str] | None) -> None:
    if not files:
        raise SoupError("a soup needs at least one file of weights, got none")
    if base is not None and len(files) < 2:
        raise ConfigError(f"Model Stock compares networks, got {len(files)}, expected at least two")
    if names is not None:
        if len(names) != len(files):
            raise ConfigError(f"there are {len(names)} names, expected one for each of {len(files)} networks")
        for file, name in zip(files, names, strict=True):
            file.path = Path(name)
    check_same_architecture(files if base is None else [*files, base])
    for name, info in files[0].tensors.items():
        if info.dtype not in DTYPE_NAMES:
            raise SoupError(f"{files[0].path} has '{name}' of {dtype_name(info.dtype)}, which safetensors cannot hold")


def _checked_weights(weights: Sequence[float] | None, size: int) -> list[float]:
    """One weight for each of `size` files, non-negative and summing to 1."""
    row = [1.0 / size] * size if weights is None else [float(weight) for weight in weights]
    if len(row) != size:
        raise SoupError(f"there are {len(row)} weights for {size} files, expected one for each")
    if not all(math.isfinite(weight) and weight >= 0 for weight in row):
        raise SoupError(f"the weights are {row}, expected finite numbers, none below 0")
    if abs(sum(row) - 1.0) > mixing.ROW_SUM_TOLERANCE:
        raise SoupError(f"the weights sum to {sum(row):.6g}, expected 1: divide them by their sum")
    return [weight / sum(row) for weight in row]


def _with_progress(blocks: Blocks, tensors: Mapping[str, TensorInfo], on_progress: OnProgress | None) -> Blocks:
    if on_progress is None:
        return blocks
    total, done = sum(info.num_bytes for info in tensors.values()), 0

    def counted(name: str) -> Iterator[Tensor]:
        nonlocal done
        for block in blocks(name):
            yield block
            done += block.nbytes
            on_progress(done, total)

    return counted


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
