"""Writing a soup: one safetensors file or several and an index, complete or not there at all.

Everything is written under hidden names that end in `.partial`, flushed to disk and renamed at the end; an index comes
last. What an interrupted run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from papa.errors import SoupError
from papa.files.weights import INDEX_SUFFIX, PathLike
from papa.storage import file_errors, flush_directory, json_text, partial_path, write_file
from papa.storage.tensors import Blocks, TensorInfo, write_tensors

SUFFIX = ".safetensors"


class Output:
    """Where a soup is written: one file, or shards and an index; in a directory it is called model.safetensors.

    A context manager: on leaving it, what is not complete is removed.
    """

    def __init__(self, path: PathLike, *, overwrite: bool) -> None:
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
        self.file, self._overwrite = path, overwrite
        self.index = path.with_name(path.name + INDEX_SUFFIX)
        self.sidecar = path.with_name(path.name + ".json")
        self.scratch = path.with_name(f".{path.name}.parts")
        """A directory for candidates while the soup is made."""
        self._made_parent = False

    def __enter__(self) -> Output:
        existing = [path for path in (self.file, self.index, *self._shards()) if path.exists()]
        if existing and not self._overwrite:
            raise SoupError(f"{existing[0]} exists: choose another output, or pass overwrite=True to replace it")
        self.__exit__()
        self._made_parent = not self.file.parent.exists()
        with file_errors(self.file.parent, "make the directory", error=SoupError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove unfinished files, of this run or of one that was killed."""
        name = glob.escape(self.file.stem)
        for pattern in (f".{name}{SUFFIX}*.partial", f".{name}-*-of-*{SUFFIX}.partial"):
            for path in self.file.parent.glob(pattern):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._made_parent:
            with contextlib.suppress(OSError):  # it holds the output
                self.file.parent.rmdir()

    def _shards(self) -> list[Path]:
        """Files that are named like shards of this output."""
        digits = "[0-9]" * 5
        return sorted(self.file.parent.glob(f"{glob.escape(self.file.stem)}-{digits}-of-{digits}{SUFFIX}"))

    def write(
        self,
        tensors: Mapping[str, TensorInfo],
        blocks: Blocks,
        *,
        metadata: Mapping[str, str],
        sidecar: str,
        max_bytes: int,
    ) -> tuple[Path, ...]:
        """Write a soup and its sidecar, then replace existing ones; returns its files, the index last if it has one."""
        shards: list[dict[str, TensorInfo]] = [{}]
        size = 0
        for name, info in tensors.items():  # in order, as many as fit; a larger tensor has its own file
            if shards[-1] and size + info.num_bytes > max_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = info
            size += info.num_bytes
        names = [f"{self.file.stem}-{number + 1:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(len(shards))]
        files = [self.file] if len(shards) == 1 else [self.file.with_name(name) for name in names]
        beside, written = {self.sidecar: sidecar.encode()}, list(files)
        if len(shards) > 1:
            weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
            size = sum(info.num_bytes for info in tensors.values())
            index = {"metadata": {"total_size": size, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
            beside[self.index] = (json_text(index, indent=2) + "\n").encode()
            written.append(self.index)
        with file_errors(self.file, "write", error=SoupError):
            for file, shard in zip(files, shards, strict=True):
                write_tensors(partial_path(file), shard, blocks, metadata=metadata)
            for path, content in beside.items():
                write_file(partial_path(path), [content])
            for old in (self.index, *self._shards()):  # the index first, so that it never names new shards
                old.unlink(missing_ok=True)
            if self.file not in written:
                self.file.unlink(missing_ok=True)
            for path in (*(path for path in beside if path != self.index), *written):
                os.replace(partial_path(path), path)
            flush_directory(self.file.parent)
        return tuple(written)
