"""Tensors in safetensors files: read in parts through the safetensors library, written block by block."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from papa._version import __version__
from papa.errors import PapaError, RunError
from papa.storage.whole_files import file_errors, write_atomically, write_file

DTYPES = {
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KIND = "a valid safetensors file"

Blocks = Callable[[str], Iterable[Tensor]]
"""From a tensor's name to its numbers, block by block, flat and in the dtype they are stored in."""


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorInfo:
        """Those of a tensor."""
        return TensorInfo(tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class TensorFile:
    """A safetensors file of which any part of any tensor can be read. Memory stays small, however large the file is.

    The safetensors library checks on opening that header and file agree. Numbers are then read and not mapped: the
    system would end a process that reads from a mapped file which was truncated since.
    """

    def __init__(self, path: Path, *, error: type[PapaError] = RunError) -> None:
        self.path, self._error = path, error
        if not path.is_file():  # opening a pipe would wait for a writer
            raise error(f"cannot read {path}: there is no such file")
        with file_errors(path, error=error, kind=KIND):
            with path.open("rb") as file:
                self._identity = identity_of(os.fstat(file.fileno()))
                offset = 8 + int.from_bytes(file.read(8), "little")
            opened: Any = safe_open(path, framework="pt")
            self.tensors: dict[str, TensorInfo] = {}
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                if dtype not in DTYPES:
                    known = ", ".join(DTYPES)
                    raise error(f"{path} has '{name}' of dtype {dtype}, which papa does not read; known: {known}")
                if any(size >= 2**63 for size in shape):
                    raise ValueError(f"'{name}' has the shape {list(shape)}")
                self.tensors[name] = TensorInfo(DTYPES[dtype], shape)
        self._offsets: dict[str, int] = {}
        for name, info in self.tensors.items():  # in the order of the file, in which there are no gaps
            self._offsets[name] = offset
            offset += info.num_bytes

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Some elements of a flattened tensor; an error if the file changed since it was opened."""
        dtype = self.tensors[name].dtype
        with file_errors(self.path, error=self._error):
            block = torch.empty(stop - start, dtype=dtype, device="cpu")
            memory = bytes_of(block)
            with self.path.open("rb", buffering=0) as file:
                is_same = identity_of(os.fstat(file.fileno())) == self._identity
                file.seek(self._offsets[name] + start * dtype.itemsize)
                while is_same and memory:
                    num_read = file.readinto(memory)
                    is_same, memory = num_read > 0, memory[num_read:]
        if not is_same:
            raise self._error(f"{self.path} changed while it was read: start again when nothing writes to it")
        return block

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.part(name, 0, self.tensors[name].numel).reshape(self.tensors[name].shape)


def identity_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Device, number, size and time: tells a file from another under its name, and from a later state of itself."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a flat, contiguous tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_tensors(
    path: Path, tensors: Mapping[str, TensorInfo], blocks: Blocks, *, metadata: Mapping[str, str], digest: Any = None
) -> int:
    """Write a safetensors file block by block, as `write_file`; the library's writers need all tensors at once."""
    return write_file(path, _parts(tensors, blocks, metadata), digest)


def _parts(
    tensors: Mapping[str, TensorInfo], blocks: Blocks, metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    # The largest item size first, so that every tensor starts at a multiple of its own item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        info = tensors[name]
        if info.dtype not in DTYPE_NAMES:
            raise RunError(f"'{name}' is {info.dtype}, which a safetensors file cannot hold")
        stop = start + info.num_bytes
        header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        for block in blocks(name):
            yield bytes_of(block)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], digest: Any = None) -> int:
    """Write tensors, one at a time; as `write_tensors`."""
    return write_file(path, network_parts(tensors), digest)


def save_network(
    path: Path, network: nn.Module | Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a network or its state dict atomically; tied tensors are there under each of their names."""
    write_atomically(path, network_parts(network, metadata))


def network_parts(
    network: nn.Module | Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A network or its state dict as the content of a safetensors file, part by part."""
    state = network.state_dict() if isinstance(network, nn.Module) else network
    infos = {name: TensorInfo.of(tensor) for name, tensor in state.items()}

    def whole(name: str) -> list[Tensor]:
        return [state[name].detach().cpu().contiguous().reshape(-1)]

    return _parts(infos, whole, {"format": "pt", "papa": __version__, **(metadata or {})})
