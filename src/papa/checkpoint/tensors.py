"""Tensors in safetensors files: written a tensor at a time, and read only when they are what is expected.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes one after the other. The
header is checked against what the reader expects before memory is taken for any tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from papa._version import __version__
from papa.checkpoint.files import opened, parse_json, read_into, replace_file
from papa.errors import RunError

DTYPES = {
    "F64": torch.float64,
    "C64": torch.complex64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 1 << 25

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""What is known of a tensor before its numbers are read."""


class DamagedError(RunError):
    """A file that is not what papa wrote: cut short, altered or gone."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, and where its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def parts_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time."""
    # Larger numbers first: then every tensor starts at a multiple of its own item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "papa": __version__, **(metadata or {})}}
    start = 0
    for name, tensor in ordered:
        if tensor.dtype not in NAMES:
            raise RunError(f"'{name}' is {tensor.dtype}, which a safetensors file cannot hold")
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield _bytes_of(tensor.detach().cpu().contiguous())


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def save_network(path: Path, network: nn.Module, metadata: Mapping[str, str] | None = None) -> None:
    """Write a network's state dict as safetensors, atomically; tied tensors are there under each of their names."""
    try:
        replace_file(path, parts_of(network.state_dict(), metadata))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


class TensorFile:
    """A safetensors file whose header was read and makes sense; its numbers come later.

    Args:
        handle: open for reading, at the beginning.
        size: of the file.
        path: for messages.
    """

    def __init__(self, handle: int, size: int, path: Path) -> None:
        self._handle, self._path, self._sha = handle, path, hashlib.sha256()
        length = int.from_bytes(self._take(8, size), "little")
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise DamagedError(f"{path} has a header of {length:,} bytes, which cannot be: it was altered or damaged")
        try:
            self.entries = _entries(parse_json(self._take(length, size)), size - 8 - length)
        except ValueError as error:
            raise DamagedError(f"{path} has a header that makes no sense: {error}") from error

    @property
    def specs(self) -> dict[str, Spec]:
        """What the header says of each tensor."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}

    def read(self) -> tuple[dict[str, Tensor], str]:
        """All tensors, and the file's SHA-256."""
        tensors = {}
        for entry in self.entries:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            self._fill(_bytes_of(tensor))
            tensors[entry.name] = tensor
        return tensors, self._sha.hexdigest()

    def _take(self, length: int, size: int) -> bytes:
        content = bytearray(min(length, size))
        self._fill(memoryview(content))
        if len(content) < length:
            raise DamagedError(f"{self._path} has {size} bytes, which is too short: it was cut off")
        return bytes(content)

    def _fill(self, view: memoryview) -> None:
        if not read_into(self._handle, view):
            raise DamagedError(f"{self._path} is shorter than its header says: it was cut off")
        self._sha.update(view)


def _entries(header: Any, num_bytes: int) -> list[Entry]:
    """The tensors a header names, in the order of their bytes; `ValueError` unless they are exactly all bytes."""
    if not isinstance(header, dict):
        raise ValueError(f"it is a {type(header).__name__}")
    entries = [_entry(name, value) for name, value in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise ValueError(f"'{entry.name}' starts at byte {entry.start}, expected {end}")
        end = entry.stop
    if end != num_bytes:
        raise ValueError(f"its tensors take {end} bytes, found {num_bytes}")
    return entries


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"'{name}' is not described as a tensor")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"'{name}' has the dtype {dtype!r}")
    if not _are_counts(shape) or len(shape) > 32 or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"'{name}' has the shape {shape!r} at {offsets!r}")
    if math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"'{name}' has the shape {shape!r}, but {offsets[1] - offsets[0]} bytes")
    return Entry(name, DTYPES[dtype], tuple(shape), *offsets)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def read_tensors(path: Path, *, size: int, sha256: str, check: Any) -> dict[str, Tensor]:
    """The tensors of a file, compared with what is known of it.

    Args:
        path: the file.
        size: the bytes it must have.
        sha256: the digest it must have.
        check: called with the header's specs before memory is taken; raises a `PapaError` when they are wrong.
    """
    with opened(path) as (handle, found):
        if found != size:
            raise DamagedError(f"{path} has {found:,} bytes, its manifest says {size:,}: it was altered or damaged")
        file = TensorFile(handle, found, path)
        check(file.specs)
        tensors, digest = file.read()
    if digest != sha256:
        raise DamagedError(f"{path} does not match the digest in its manifest: it was altered or damaged")
    return tensors
