"""Writing safetensors a block at a time, in one file or several, complete or not there at all.

Everything is written under hidden names that end in `.partial`, flushed to disk and renamed at the end; where there are
several files their index comes last. What an interrupted run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from papa.checkpoint import json_text
from papa.checkpoint.files import flush_directory
from papa.errors import SoupError
from papa.files.header import NAMES, TensorInfo, header_bytes
from papa.files.sources import INDEX_SUFFIX, bytes_of

SUFFIX = ".safetensors"
BUFFER_BYTES = 1 << 16
"""What is smaller is gathered before it is written; whole blocks are not copied once more."""


class Output:
    """Where a soup goes: one file, or shards and an index beside it.

    Args:
        path: a file that ends in .safetensors, or a directory in which it is called model.safetensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        if path.suffix != SUFFIX:
            if path.suffix and not path.is_dir():
                raise SoupError(
                    f"the output is {path}, expected a name that ends in {SUFFIX}, or a directory: soups are written "
                    "as safetensors"
                )
            path = path / f"model{SUFFIX}"
        elif path.is_dir():
            raise SoupError(f"the output {path} is a directory: choose another name")
        self.file = path
        self.index = path.with_name(path.name + INDEX_SUFFIX)
        self.sidecar = path.with_name(path.name + ".json")
        self.scores = path.with_name(path.name + ".scores.json")
        self.workshop = path.with_name(f".{path.name}.parts")
        """Where a soup's candidates and aligned networks lie while it is made."""
        self._made_parent = False

    def shard(self, number: int, count: int) -> Path:
        """The name of a shard, as hubs call them."""
        return self.file.with_name(f"{self.file.stem}-{number:05d}-of-{count:05d}{SUFFIX}")

    @property
    def loose_shards(self) -> list[Path]:
        """Files that are named like shards of this output."""
        digits = "[0-9]" * 5
        return sorted(self.file.parent.glob(f"{_literal(self.file.stem)}-{digits}-of-{digits}{SUFFIX}"))

    def check(self, *, overwrite: bool) -> None:
        """Refuse an output that is there, unless told to overwrite it, and make room for a new one."""
        there = [path for path in (self.file, self.index, *self.loose_shards) if path.exists()]
        if there and not overwrite:
            raise SoupError(f"{there[0]} exists: choose another output, or replace it with --overwrite")
        self.remove_partial()
        self._made_parent = not self.file.parent.exists()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SoupError(f"cannot make the directory {self.file.parent}: {error.strerror or error}") from error

    def remove_partial(self) -> None:
        """Remove what was not finished, now or by a run that was killed."""
        name = _literal(self.file.stem)
        for pattern in (f".{name}{SUFFIX}*.partial", f".{name}-*-of-*{SUFFIX}.partial"):
            for path in self.file.parent.glob(pattern):
                path.unlink(missing_ok=True)
        if self.workshop.is_dir():
            for path in self.workshop.iterdir():
                path.unlink(missing_ok=True)
            self.workshop.rmdir()
        if self._made_parent:
            with contextlib.suppress(OSError):  # it holds the output, or scores
                self.file.parent.rmdir()


def _literal(name: str) -> str:
    """A name as a pattern that matches nothing else."""
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in name)


def partial_of(path: Path) -> Path:
    """The hidden name a file has until it is finished."""
    return path.with_name(f".{path.name}.partial")


Blocks = Callable[[str], Iterable[Tensor]]
"""From a tensor's name to its numbers, block by block, flat and in the dtype they are stored in."""


def write_output(
    output: Output,
    tensors: Mapping[str, TensorInfo],
    blocks: Blocks,
    *,
    metadata: Mapping[str, str],
    sidecar: str,
    most_bytes: int,
) -> list[Path]:
    """Write a soup and its sidecar, and only then replace what was there.

    Returns:
        The files of the soup; the index last where there are several.
    """
    shards = plan_shards(tensors, most_bytes)
    files = [output.file] if len(shards) == 1 else [output.shard(n + 1, len(shards)) for n in range(len(shards))]
    written = list(files)
    for file, shard in zip(files, shards, strict=True):
        write_file(partial_of(file), shard, blocks, metadata)
    with told_as_soup_errors(output.file):
        if len(shards) > 1:
            weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
            size = sum(info.num_bytes for info in tensors.values())
            index = {"metadata": {"total_size": size, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
            _write_text(partial_of(output.index), json_text(index, indent=2) + "\n")
            written.append(output.index)
        _write_text(partial_of(output.sidecar), sidecar)
        _commit(output, written)
    return written


def _commit(output: Output, written: Sequence[Path]) -> None:
    """Give everything its name. An old index goes first, so that it never names new shards."""
    for old in (output.index, *output.loose_shards):
        old.unlink(missing_ok=True)
    if output.file not in written:
        output.file.unlink(missing_ok=True)
    for file in (output.sidecar, *written):
        os.replace(partial_of(file), file)
    flush_directory(output.file.parent)


def plan_shards(tensors: Mapping[str, TensorInfo], most_bytes: int) -> list[dict[str, TensorInfo]]:
    """Which tensor goes into which file: in order, as many as fit; one that is larger has a file of its own."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.num_bytes > most_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.num_bytes
    return shards


def write_file(path: Path, tensors: Mapping[str, TensorInfo], blocks: Blocks, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file as its numbers come, and flush it to disk."""
    # The widest first, so that every number lies at a multiple of its size.
    ordered = dict(sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize))
    for name, info in ordered.items():
        if info.dtype not in NAMES:
            raise SoupError(f"'{name}' is of dtype {info.dtype}, which safetensors cannot hold; known: {list(NAMES)}")
    with told_as_soup_errors(path), path.open("wb", buffering=BUFFER_BYTES) as file:
        file.write(header_bytes(ordered, metadata))
        for name in ordered:
            for block in blocks(name):
                file.write(bytes_of(block))
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def told_as_soup_errors(path: Path) -> Iterator[None]:
    """Tell what the system says about writing a file as a `SoupError`."""
    try:
        yield
    except OSError as error:
        raise SoupError(f"cannot write {path}: {error.strerror or error}") from error


def read_json_file(path: Path) -> object:
    """A JSON file beside an output; None when it is not there."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SoupError(f"{path} cannot be read ({error}): remove it to start anew") from error
