"""Writing a soup: one safetensors file or several and an index, complete or not there at all.

Everything is written under hidden names that end in `.partial`, flushed to disk and renamed at the end; an index comes
last. What an interrupted run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from papa.errors import SoupError
from papa.files.weights import INDEX_SUFFIX, PathLike, WeightsFile
from papa.storage import file_errors, flush_directory, json_text, parse_json, partial_path, read_file, write_file
from papa.storage.tensors import Blocks, TensorInfo, write_tensors

SUFFIX = ".safetensors"
CONFIG = "config.json"
COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "source.spm"),
    *("target.spm", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""What is copied from the folder of a model hub besides its config. No code is."""


class Output:
    """Where a soup is written: one file, or shards and an index; in a directory it is called model.safetensors.

    A context manager: on leaving it, what is not complete is removed.
    """

    def __init__(self, path: PathLike, *, overwrite: bool) -> None:
        path = Path(path)
        self.is_directory = path.suffix != SUFFIX
        if self.is_directory:
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
        self.scores = path.with_name(path.name + ".scores.json")
        self.scratch = path.with_name(f".{path.name}.parts")
        """A directory for candidates and aligned networks while the soup is made."""
        self.beside: dict[Path, bytes] = {}
        """Files that are written beside the soup, such as a config."""
        self._made_parent = False

    def copy_companions(self, files: Sequence[WeightsFile], dtype: str | None) -> list[str]:
        """Write the config and tokenizer of the first network beside the soup, if it has any; notes about them."""
        folders = [file.files[0].parent for file in files]
        if not (folders[0] / CONFIG).is_file():
            return []
        found = {
            name: read_file(folders[0] / name, error=SoupError) for name in COPIED if (folders[0] / name).is_file()
        }
        others = [(folder / name, content) for folder in folders[1:] for name, content in found.items()]
        different = {path.name for path, content in others if path.is_file() and path.read_bytes() != content}
        notes = [f"{name} differs between the folders: that of the first was copied" for name in sorted(different)]
        notes += [f"{path.name} is code and was not copied: do so if you trust it" for path in folders[0].glob("*.py")]
        with file_errors(folders[0] / CONFIG, error=SoupError, kind="valid JSON"):
            found[CONFIG] = read_file(folders[0] / CONFIG, error=SoupError)
            config = parse_json(found[CONFIG], allow_control=True)
        keys = [key for key in ("dtype", "torch_dtype") if isinstance(config, dict) and key in config]
        if dtype is not None and keys:
            found[CONFIG] = (json.dumps({**config, **dict.fromkeys(keys, dtype)}, indent=2) + "\n").encode()
        self.beside = {self.file.with_name(name): content for name, content in found.items()}
        return notes

    def __enter__(self) -> Output:
        existing = [path for path in (self.file, self.index, *self._shards(), *self.beside) if path.exists()]
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
        for path in self.beside:
            partial_path(path).unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._made_parent:
            with contextlib.suppress(OSError):  # it holds the output, or scores
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
        shards = plan_shards(tensors, max_bytes)
        names = [f"{self.file.stem}-{number + 1:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(len(shards))]
        files = [self.file] if len(shards) == 1 else [self.file.with_name(name) for name in names]
        beside, written = {**self.beside, self.sidecar: sidecar.encode()}, list(files)
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
