"""Distributed checkpoints: the directories that `torch.distributed.checkpoint` writes, read a tensor at a time.

Such a directory holds `.metadata`, a pickle that says which part of which tensor is where, and files with the parts.
PyTorch reads the parts without running anything from them. Its reader of the metadata would run code, so the pickle is
read here: of the names in it only PyTorch's plain data classes are looked up.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from papa.errors import SoupError
from papa.files.networks import StoredTensor
from papa.files.weights import METADATA
from papa.storage import read_file
from papa.storage.tensors import TensorInfo

KINDS = (
    *(classes.Metadata, classes.MetadataIndex, classes.TensorStorageMetadata, classes.ChunkStorageMetadata),
    *(classes.BytesStorageMetadata, filesystem._StorageInfo),
)
KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in KINDS},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): lambda values=(): torch.Size(values[:64]),
}
"""What metadata consist of; all of it is plain data."""
MAX_ARGS = 100
"""More than any call in metadata needs."""
# Python's own reader of pickles: that in C allocates what a pickle claims.
_Unpickler: Any = pickle._Unpickler


class _Ignored:
    """What stands for everything else, such as the layout of tensors: it keeps the state that it is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataReader(_Unpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """A plain class, or what stands for it; nothing is imported."""
        return KNOWN.get((module, name), _Ignored)

    def load_reduce(self) -> None:
        _check_args(self.stack[-1])
        super().load_reduce()

    def load_newobj(self) -> None:
        _check_args(self.stack[-1])
        super().load_newobj()

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):
            raise ValueError("it changes a class")
        super().load_build()

    dispatch |= {pickle.REDUCE[0]: load_reduce, pickle.NEWOBJ[0]: load_newobj, pickle.BUILD[0]: load_build}
    for code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8):
        del dispatch[code[0]]


def _check_args(args: tuple[Any, ...]) -> None:
    if len(args) > MAX_ARGS:  # each call copies them
        raise ValueError(f"a call with more than {MAX_ARGS} arguments")


class _Reader(filesystem.FileSystemReader):
    """PyTorch's reader, with metadata that were read already."""

    def __init__(self, directory: Path, metadata: classes.Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> classes.Metadata:
        return self._metadata


def distributed_content(directory: Path) -> tuple[dict[str, Any], list[Path]]:
    """The content of a distributed checkpoint, nested as it was saved, and its files."""
    path = directory / METADATA
    data = read_file(path, error=SoupError)
    try:
        metadata = _MetadataReader(io.BytesIO(data)).load()
        names = {storage.relative_path for storage in metadata.storage_data.values()}
        if not all(type(name) is str and Path(name).name == name and not set("\\\0") & set(name) for name in names):
            raise ValueError("it names a file outside of its directory")
        entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        infos = {name: _info_of(name, entry) for name, entry in entries.items()}
        places = {name: (metadata.planner_data or {}).get(name, (name,)) for name in infos}
        content: dict[str, Any] = {}

        @lru_cache(maxsize=1)
        def whole(name: str) -> Tensor:
            return _read(directory, metadata, name, infos[name])

        def part_of(name: str) -> Callable[[int, int], Tensor]:
            return lambda start, stop: whole(name)[start:stop]

        for name, info in infos.items():
            *outer, last = map(str, places[name])
            inner = content
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = StoredTensor(info, part_of(name))
    except Exception as error:  # a pickle may hold anything
        reason = f"{type(error).__name__}: {error}"[:200]
        raise SoupError(f"{path} is not valid metadata of a distributed checkpoint ({reason})") from error
    files = [path, *(directory / name for name in sorted(names))]
    for file in files:
        if not file.is_file():
            raise SoupError(f"{path} names the file {file.name}, which does not exist: copy the whole directory")
    num_bytes = sum(file.stat().st_size for file in files)
    for name, info in infos.items():
        if info.num_bytes > num_bytes:
            raise SoupError(f"{path} has '{name}', which is larger than the files: it may be truncated or altered")
    return content, files


def _info_of(name: str, entry: Any) -> TensorInfo:
    """Dtype and shape; a `ValueError` unless the chunks have as many elements as the tensor."""
    dtype, shape = entry.properties.state[0], tuple(entry.size)
    sizes = [size for chunk in entry.chunks for size in (*chunk.offsets, *chunk.sizes)]
    if not all(type(size) is int and size >= 0 for size in (*shape, *sizes)) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' has no shape or no dtype")
    if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(shape):
        raise ValueError(f"the parts of '{name}' are not the whole tensor")
    return TensorInfo(dtype, shape)


def _read(directory: Path, metadata: classes.Metadata, name: str, info: TensorInfo) -> Tensor:
    tensor = torch.zeros(info.shape, dtype=info.dtype, device="cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process
            load({name: tensor}, storage_reader=_Reader(directory, metadata), no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        reason = (str(cause).splitlines() or [type(cause).__name__])[0].split(". ")[0][:200]
        raise SoupError(f"'{name}' in {directory} cannot be read: {reason}; it may be truncated or altered") from error
    return tensor.reshape(-1)
