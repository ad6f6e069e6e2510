"""Distributed checkpoints: the directories that `torch.distributed.checkpoint` writes, read without loading them.

A directory holds `.metadata`, a pickle that says which part of which tensor is where, and files in which each part is
stored as `torch.save` writes it. Both are read as data: nothing in them is run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from papa.errors import SoupError
from papa.files.inert_pickle import Stub, load_inert
from papa.files.state_dicts import NamedTensor
from papa.files.torch_archive import DTYPES, StoredTensor, TorchArchive
from papa.files.weights import Content
from papa.storage import file_errors, read_file
from papa.storage.tensors import TensorInfo

METADATA = ".metadata"
KIND = "valid metadata of a distributed checkpoint"
MODULE = "torch.distributed.checkpoint"


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor: where it begins, its shape, and the file, position and length of its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    length: int


def distributed_content(directory: Path) -> Content:
    """The content of a distributed checkpoint, nested as it was saved."""
    path = directory / METADATA
    data = read_file(path, error=SoupError)
    with file_errors(path, error=SoupError, kind=KIND):
        metadata, _ = load_inert(data, _KNOWN)
        fields = _fields(metadata, "metadata.Metadata")
        chunks, infos = _chunks(fields), _infos(fields)
        for name, info in infos.items():
            _check_complete(name, info, chunks.get(name, []))
        value = _nested(infos, fields.get("planner_data"))
    files = sorted({directory / chunk.file for parts in chunks.values() for chunk in parts})
    for file in files:
        if not file.is_file():
            raise SoupError(f"{path} names the file {file.name}, which does not exist: copy the whole directory")

    @lru_cache(maxsize=8)
    def archive(chunk: _Chunk) -> tuple[TorchArchive, StoredTensor]:
        return _open_chunk(directory, chunk)

    @lru_cache(maxsize=1)
    def whole(name: str) -> Tensor:
        return _assemble(infos[name], [(chunk, *archive(chunk)) for chunk in chunks[name]])

    def part(tensor: NamedTensor, start: int, stop: int) -> Tensor:
        parts = chunks[tensor.name]
        if any(chunk.shape[1:] != tensor.info.shape[1:] for chunk in parts):  # not split by rows
            return whole(tensor.name)[start:stop]
        row = math.prod(tensor.info.shape[1:])
        found = []
        for chunk in parts:
            first = chunk.offsets[0] * row if chunk.offsets else 0
            low, high = max(start, first), min(stop, first + math.prod(chunk.shape))
            if low < high:
                source, stored = archive(chunk)
                found.append(source.part(stored, low - first, high - first))
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=tensor.info.dtype), *found])

    return Content(directory, value, part, [path, *files])


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The fields of a dataclass of `torch.distributed.checkpoint`."""
    if not isinstance(value, Stub) or value.name != f"{MODULE}.{name}" or not isinstance(value.state, dict):
        raise ValueError(f"it has no {name} where one is expected")
    return value.state


def _infos(metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Every tensor's dtype and shape; values that are no tensors are left out."""
    infos = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if isinstance(entry, Stub) and entry.name == f"{MODULE}.metadata.TensorStorageMetadata":
            dtype = entry.state["properties"].state[0]
            if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
                raise ValueError("it has a tensor of an unknown kind")
            infos[name] = TensorInfo(dtype, _numbers(entry.state["size"]))
    return infos


def _chunks(metadata: Mapping[str, Any]) -> dict[str, list[_Chunk]]:
    """The parts of every tensor, in order."""
    places: dict[Any, tuple[str, int, int]] = {}
    for index, storage in metadata["storage_data"].items():
        key, place = _fields(index, "metadata.MetadataIndex"), _fields(storage, "filesystem._StorageInfo")
        if place.get("transform_descriptors"):
            raise ValueError("its parts are compressed or otherwise transformed: save it without")
        file = place["relative_path"]
        if not isinstance(file, str) or len(PurePosixPath(file).parts) != 1 or set("\\\0/") & set(file) or file == "..":
            raise ValueError("it names a file outside of its directory")
        offsets = () if key.get("offset") is None else _numbers(key["offset"])
        position, length = _numbers((place["offset"], place["length"]))
        places[key["fqn"], offsets] = (file, position, length)
    chunks: dict[str, list[_Chunk]] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if isinstance(entry, Stub) and entry.name == f"{MODULE}.metadata.TensorStorageMetadata":
            for chunk in entry.state["chunks"]:
                fields = _fields(chunk, "metadata.ChunkStorageMetadata")
                offsets, shape = _numbers(fields["offsets"]), _numbers(fields["sizes"])
                chunks.setdefault(name, []).append(_Chunk(offsets, shape, *places[name, offsets]))
    return {name: sorted(parts, key=lambda chunk: chunk.offsets) for name, parts in chunks.items()}


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("it has a shape or position that is none")
    return tuple(values)


def _check_complete(name: str, info: TensorInfo, chunks: list[_Chunk]) -> None:
    """Raise a `ValueError` unless chunks lie within the tensor and have as many elements."""
    for chunk in chunks:
        is_inside = len(chunk.offsets) == len(chunk.shape) == len(info.shape) and all(
            offset + size <= limit for offset, size, limit in zip(chunk.offsets, chunk.shape, info.shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"a part of '{name}' is outside of the tensor")
    if sum(math.prod(chunk.shape) for chunk in chunks) != info.numel:
        raise ValueError(f"the parts of '{name}' are not the whole tensor")


def _nested(infos: Mapping[str, TensorInfo], mapping: Any) -> dict[Any, Any]:
    """The tensors as the nested mappings that were saved; names of lists' entries are numbers."""
    value: dict[Any, Any] = {}
    for name, info in infos.items():
        place = mapping.get(name) if isinstance(mapping, dict) else None
        *outer, last = place if isinstance(place, tuple) and place else (name,)
        inner = value
        for part in outer:
            inner = inner.setdefault(str(part), {})
        inner[str(last)] = NamedTensor(name, info)
    return value


def _open_chunk(directory: Path, chunk: _Chunk) -> tuple[TorchArchive, StoredTensor]:
    path = directory / chunk.file
    archive = TorchArchive(path, start=chunk.position, length=chunk.length, error=SoupError)
    with file_errors(path, error=SoupError, kind="a valid part of a distributed checkpoint"):
        stored = archive.content
        if not isinstance(stored, StoredTensor) or stored.shape != chunk.shape:
            raise ValueError("it has something else than the tensor that the metadata names")
        archive.check(stored)
    return archive, stored


def _assemble(info: TensorInfo, parts: list[tuple[_Chunk, TorchArchive, StoredTensor]]) -> Tensor:
    """A tensor that is not split by rows, flat."""
    tensor = torch.empty(info.shape, dtype=info.dtype)
    for chunk, archive, stored in parts:
        place = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.shape, strict=True))
        tensor[place] = archive.part(stored, 0, stored.info.numel).reshape(chunk.shape)
    return tensor.reshape(-1)


def _shape(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values[:64]) if isinstance(values, tuple | list) else ()


_KNOWN: dict[str, Any] = {"torch.Size": _shape, **{f"torch.{name}": dtype for name, dtype in DTYPES.items()}}
