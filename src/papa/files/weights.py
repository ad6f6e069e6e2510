"""Opening weights by path: files and folders of many kinds, of which a part of a tensor is read at a time."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from papa.errors import SoupError
from papa.files.networks import Stored, StoredTensor, find_networks, stored_tensors
from papa.storage import file_errors, read_json, validated
from papa.storage.tensors import TensorFile

PathLike: TypeAlias = str | os.PathLike[str]

WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
"""The weights of a directory that is not sharded."""
INDEX_SUFFIX = ".index.json"
METADATA = ".metadata"
"""What a directory of `torch.distributed.checkpoint` has."""
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Suffixes that only files of `torch.save` have."""
ZIP, OLD_TORCH = b"PK\x03\x04", b"\x80\x02\x8a\x0a"
"""How files of `torch.save` begin, and those of PyTorch before 1.6."""
KINDS = {
    b"GGUF": "a GGUF file, made for llama.cpp and mostly quantized: name the safetensors or PyTorch files that it was "
    "made from",
    b"\x89HDF": "an HDF5 file: save the weights as safetensors",
}
"""Files that hold weights but are not read, by how they begin."""
_multiarray: Any = importlib.import_module(f"numpy.{'_core' if hasattr(np, '_core') else 'core'}.multiarray")
SAFE_GLOBALS: tuple[Any, ...] = (
    *(argparse.Namespace, PosixPath, np.ndarray, np.dtype),
    *(_multiarray.scalar, _multiarray._reconstruct),
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")),
)
"""What training scripts save with their weights, and what runs no code when it is loaded."""


class WeightsFile:
    """Named tensors that stay on disk until a part of one is read.

    `files` are those it consists of; `notes` say what a user should know about how it was read; `label` says which of
    several networks in a file it is.
    """

    def __init__(
        self, path: Path, stored: Stored, *, files: Sequence[Path], notes: Sequence[str] = (), label: str = ""
    ) -> None:
        self.path = Path(f"{path}:{label}") if label else path
        self.tensors = {name: one.info for name, one in stored.items()}
        self.files, self.notes, self.label = tuple(files), tuple(notes), label
        self._stored = stored

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The elements of a flattened tensor from `start` to `stop`."""
        return self._stored[name].part(start, stop)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        info = self.tensors[name]
        return self.part(name, 0, info.numel).reshape(info.shape)


def open_all(paths: Iterable[PathLike], *, key: str | None = None) -> list[WeightsFile]:
    """Open files without reading their numbers.

    Takes safetensors files; index files, or directories that hold one; PyTorch files; directories of
    `torch.distributed.checkpoint`. What holds several networks stands for all of them: a directory that Accelerate
    saved several models to, a file of a wrapper's state dict. The key is the place of the weights in a file: names
    joined by dots, such as "ema"; "members.*" for each of several networks, "." for all as one.
    """
    return [weights for path in map(Path, paths) for weights in _open(path, key)]


def open_weights(path: PathLike, *, key: str | None = None) -> WeightsFile:
    """Open one network's weights without reading their numbers; see `open_all`."""
    path = Path(path)
    found = _open(path, key)
    if len(found) > 1:
        names = ", ".join(str(weights.path) for weights in found)
        remedy = "name the one you mean" if path.is_dir() else f"set the key, such as '{found[0].label}'"
        raise SoupError(f"{path} holds {len(found)} networks ({names}), expected one: {remedy}")
    return found[0]


def _open(path: Path, key: str | None) -> list[WeightsFile]:
    if path.is_dir() and not (path / METADATA).is_file():
        return [weights for file in _files_in(path) for weights in _open(file, key)]
    content: Any
    files, notes = [path], []
    if path.is_dir() or path.name == METADATA:
        from papa.files.distributed import distributed_content  # its imports take a second

        path = path if path.is_dir() else path.parent
        content, files = distributed_content(path)
    elif path.name.endswith(INDEX_SUFFIX) and path.is_file():
        content, files = _sharded_content(path)
    else:
        content = _content(path)
        if _beginning(path) == OLD_TORCH:
            notes = ["in PyTorch's old format, which is read as a whole: memory holds all of it"]
    networks, choice = find_networks(path, content, key)
    notes += choice
    return [WeightsFile(path, stored, files=files, notes=notes, label=label) for label, stored in networks]


def _files_in(directory: Path) -> list[Path]:
    """The index in a directory, or its one file and others that Accelerate saved beside it, such as model_1."""
    indices = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        listing = ", ".join(index.name for index in indices)
        raise SoupError(f"{directory} has several indices ({listing}): name the one you mean")
    if indices:
        return indices
    for file in filter(Path.is_file, (directory / name for name in WHOLE_NAMES)):
        others = {other.stem.removeprefix(f"{file.stem}_"): other for other in directory.glob(f"*{file.suffix}")}
        return [file, *(others[number] for number in sorted(filter(str.isdecimal, others), key=int))]
    raise SoupError(
        f"{directory} holds no weights: expected an index (*{INDEX_SUFFIX}), {', '.join(WHOLE_NAMES[:2])}, an adapter "
        "or a distributed checkpoint; name the file you mean"
    )


class Index(TypedDict):
    """What the index of a sharded checkpoint holds."""

    weight_map: dict[str, str]


def _sharded_content(index: Path) -> tuple[Stored, list[Path]]:
    with file_errors(index, error=SoupError, kind="a valid index of shards"):
        weight_map = validated(read_json(index, error=SoupError), Index)["weight_map"]
    if not weight_map:
        raise SoupError(f"{index} names no tensor, expected the weights of a network")
    shards: dict[str, Stored] = {}
    for file in dict.fromkeys(weight_map.values()):
        parts = PurePosixPath(file).parts
        if file.startswith("/") or ".." in parts or "\\" in file or "\0" in file or file.endswith(INDEX_SUFFIX):
            raise SoupError(f"{index} names the file '{file}', expected a file in the directory of the index")
        if not (index.parent / file).is_file():
            raise SoupError(f"{index} names the file {file}, which does not exist: download the missing shard")
        shards[file] = stored_tensors(index.parent / file, _content(index.parent / file))
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise SoupError(f"{index} says that '{name}' is in {file}, but it is not: the shards are of another index")
    return {name: shards[file][name] for name, file in weight_map.items()}, [index.parent / file for file in shards]


def _beginning(path: Path) -> bytes:
    if not path.is_file():
        raise SoupError(f"there is no file {path}: name a file of weights, or a directory that holds one")
    with file_errors(path, error=SoupError), path.open("rb") as file:
        return file.read(4)


def _content(path: Path) -> Any:
    """What one file holds: of safetensors, or by `torch.save`."""
    beginning = _beginning(path)
    if beginning in KINDS:
        raise SoupError(f"{path} is {KINDS[beginning]}")
    is_torch = beginning in (ZIP, OLD_TORCH)
    if path.suffix in TORCH_SUFFIXES and not is_torch:
        raise SoupError(f"{path} is not a valid PyTorch file: it does not begin as torch.save begins one")
    if is_torch and path.suffix != ".safetensors":
        return _torch_content(path, is_old=beginning == OLD_TORCH)
    file = TensorFile(path, error=SoupError)
    if not file.tensors:
        raise SoupError(f"{path} holds no tensor, expected the weights of a network")
    return {name: StoredTensor(info, partial(file.part, name)) for name, info in file.tensors.items()}


def _torch_content(path: Path, *, is_old: bool) -> Any:
    """What `torch.save` wrote, its tensors mapped into memory: only tensors and plain values, never code."""
    with file_errors(path, error=SoupError):
        try:
            if not is_old:  # what is mapped into memory cannot be unpacked
                with zipfile.ZipFile(path) as archive:
                    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                        raise SoupError(f"{path} is compressed, expected a file by torch.save: save it again")
            with warnings.catch_warnings(), torch.serialization.safe_globals(list(SAFE_GLOBALS)):
                warnings.simplefilter("ignore")
                return torch.load(path, map_location="cpu", weights_only=True, mmap=not is_old)
        except (OSError, SoupError):
            raise
        except Exception as error:  # the pickle in it may fail in any way
            # PyTorch's own message explains how to load it anyway, which is no good advice.
            found = re.search(r"GLOBAL (\S+)", str(error))
            if found is not None:
                raise SoupError(
                    f"{path} holds an object of {found[1]}, and nothing that could run code is loaded: save the state "
                    'dict alone, torch.save(network.state_dict(), "weights.pt")'
                ) from error
            reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0][:200]
            raise SoupError(f"{path} is not a valid PyTorch file: {reason}; it may be truncated or altered") from error
