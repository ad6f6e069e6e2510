"""The safetensors header: what a file says is in it, believed only after every number was checked against its size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from papa.errors import SoupError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of the dtypes that are read and written."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000
"""What the format allows at most."""
MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is, without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes they take."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Place: TypeAlias = tuple[TensorInfo, int]
"""A tensor and where in the file its bytes begin."""


def read_header(path: Path) -> dict[str, Place]:
    """Every tensor of a safetensors file and where its bytes begin.

    Tensors must follow each other without gap or overlap and fill the file exactly, so a file that was cut short or
    written over shows here, before any of its numbers is read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise _damaged(path, f"its header should have {length} bytes, the file has {size}")
            text = file.read(length)
    except OSError as error:
        raise SoupError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({str(error)[:100]})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not an object")
    entries.pop("__metadata__", None)
    begin = 8 + length
    places: list[tuple[int, int, str, TensorInfo]] = []
    for name, entry in entries.items():
        info, start, stop = _checked(path, name, entry)
        places.append((start, stop, name, info))
    end = 0
    for start, stop, name, _ in sorted(places, key=lambda place: place[:2]):
        if start != end:
            raise _damaged(path, f"'{name}' begins at byte {start} of the data, expected {end}")
        end = stop
    if begin + end != size:
        raise _damaged(path, f"its tensors end at byte {begin + end}, the file has {size}")
    offsets = {name: begin + start for start, _, name, _ in places}
    return {name: (info, offsets[name]) for _, _, name, info in places}


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name stands twice")
    return entries


def _checked(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the entry of '{name}' is not a dtype, a shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SoupError(f"{path} has '{name}' of dtype {dtype}, which papa does not read; known: {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise _damaged(path, f"the shape of '{name}' is {str(shape)[:60]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"the offsets of '{name}' are {str(offsets)[:60]}")
    info = TensorInfo(DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != info.num_bytes:
        found = offsets[1] - offsets[0]
        raise _damaged(path, f"'{name}' has {found} bytes, its shape and dtype need {info.num_bytes}")
    return info, offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _damaged(path: Path, reason: str) -> SoupError:
    return SoupError(f"{path} is not a whole safetensors file: {reason}; fetch or write it again")


def header_bytes(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds these tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, info in tensors.items():
        stop = start + info.num_bytes
        entries[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that numbers lie where their size divides the address
    return len(text).to_bytes(8, "little") + text
