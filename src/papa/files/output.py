"""Writing a soup: one safetensors file or several and an index, complete or not there at all.

Everything is written under hidden names that end in `.partial`, flushed to disk and renamed at the end; an index comes
last. What an interrupted run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from papa.errors import SoupError
from papa.files.opening import INDEX_SUFFIX
from papa.storage import file_errors, flush_directory, json_text, write_file
from papa.storage.tensors import Blocks, TensorInfo, write_tensors
from papa.storage.whole_files import partial_path

SUFFIX = ".safetensors"


class Output:
    """Where a soup is written: one file, or shards and an index; in a directory it is called model.safetensors.

    Args:
        path: a file that ends in .safetensors, or a directory.
        stem: the name of the file in a directory, without its suffix.
    """

    def __init__(self, path: str | os.PathLike[str], stem: str = "model") -> None:
        path = Path(path)
        self.is_directory = path.suffix != SUFFIX
        if path.suffix != SUFFIX:
            if path.suffix and not path.is_dir():
                raise SoupError(
                    f"the output is {path}, expected a name that ends in {SUFFIX}, or a directory: soups are written "
                    "as safetensors"
                )
            path = path / f"{stem}{SUFFIX}"
        elif path.is_dir():
            raise SoupError(f"the output {path} is a directory: choose another name")
        self.file = path
        self.index = path.with_name(path.name + INDEX_SUFFIX)
        self.sidecar = path.with_name(path.name + ".json")
        self.scores = path.with_name(path.name + ".scores.json")
        self.scratch = path.with_name(f".{path.name}.parts")
        """A directory for candidates and aligned networks while the soup is made."""
        self.extras: dict[Path, bytes] = {}
        """Files that are written beside the soup, such as a config."""
        self._made_parent = False

    def add(self, files: Mapping[str, bytes]) -> None:
        """Write these files beside the soup."""
        self.extras |= {self.file.with_name(name): content for name, content in files.items()}

    def shard(self, number: int, count: int) -> Path:
        """The name of a shard, by the convention of model hubs."""
        return self.file.with_name(f"{self.file.stem}-{number:05d}-of-{count:05d}{SUFFIX}")

    @property
    def existing_shards(self) -> list[Path]:
        """Files that are named like shards of this output."""
        digits = "[0-9]" * 5
        return sorted(self.file.parent.glob(f"{glob.escape(self.file.stem)}-{digits}-of-{digits}{SUFFIX}"))

    def prepare(self, *, overwrite: bool) -> None:
        """Refuse to replace an existing output, unless `overwrite`, and make the directory for a new one."""
        existing = [path for path in (self.file, self.index, *self.existing_shards, *self.extras) if path.exists()]
        if existing and not overwrite:
            raise SoupError(f"{existing[0]} exists: choose another output, or pass overwrite=True to replace it")
        self.clean_up()
        self._made_parent = not self.file.parent.exists()
        with file_errors(self.file.parent, "make the directory", error=SoupError):
            self.file.parent.mkdir(parents=True, exist_ok=True)

    def clean_up(self) -> None:
        """Remove unfinished files, of this run or of one that was killed."""
        name = glob.escape(self.file.stem)
        for pattern in (f".{name}{SUFFIX}*.partial", f".{name}-*-of-*{SUFFIX}.partial"):
            for path in self.file.parent.glob(pattern):
                path.unlink(missing_ok=True)
        for extra in self.extras:
            partial_path(extra).unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._made_parent:
            with contextlib.suppress(OSError):  # it holds the output, or scores
                self.file.parent.rmdir()


def write_output(
    output: Output,
    tensors: Mapping[str, TensorInfo],
    blocks: Blocks,
    *,
    metadata: Mapping[str, str],
    sidecar: str,
    max_bytes: int,
) -> list[Path]:
    """Write a soup and its sidecar, then replace the existing ones; returns its files, the index last if it has one."""
    shards = plan_shards(tensors, max_bytes)
    files = [output.file] if len(shards) == 1 else [output.shard(n + 1, len(shards)) for n in range(len(shards))]
    written = list(files)
    with file_errors(output.file, "write", error=SoupError):
        for file, shard in zip(files, shards, strict=True):
            write_tensors(partial_path(file), shard, blocks, metadata=metadata)
        if len(shards) > 1:
            weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
            size = sum(info.num_bytes for info in tensors.values())
            index = {"metadata": {"total_size": size, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
            write_file(partial_path(output.index), [(json_text(index, indent=2) + "\n").encode()])
            written.append(output.index)
        for extra, content in {**output.extras, output.sidecar: sidecar.encode()}.items():
            write_file(partial_path(extra), [content])
        _rename(output, written)
    return written


def _rename(output: Output, written: Sequence[Path]) -> None:
    """Give all files their final names. An old index goes first, so that it never names new shards."""
    for old in (output.index, *output.existing_shards):
        old.unlink(missing_ok=True)
    if output.file not in written:
        output.file.unlink(missing_ok=True)
    for file in (output.sidecar, *output.extras, *written):
        os.replace(partial_path(file), file)
    flush_directory(output.file.parent)


def plan_shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[dict[str, TensorInfo]]:
    """Distribute tensors over files: in order, as many as fit; a larger tensor has its own file."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.num_bytes
    return shards
