"""Tensors in files by `torch.save`: read in parts, and without running anything from them."""

from __future__ import annotations

import math
import os
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from papa.errors import PapaError, RunError
from papa.files.inert_pickle import Stub, load_inert
from papa.storage.tensors import TensorInfo, identity_of, read_block
from papa.storage.whole_files import file_errors

KIND = "a valid PyTorch file"
MAX_DIMENSIONS = 64
"""As many as PyTorch allows."""
LOCAL_HEADER_BYTES = 30
"""The fixed part of the header before each record of a zip archive; names and extras follow."""
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Untyped": torch.uint8},
}


@dataclass(frozen=True)
class _Record:
    """The numbers of a storage: a name in the archive, and the dtype."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an archive, not read yet."""

    record: str
    dtype: torch.dtype
    offset: int
    """Of the first element in the record, in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def info(self) -> TensorInfo:
        """Dtype and shape."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are one after the other in the record."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """The number of elements of the record from its first to its last element."""
        if not math.prod(self.shape):
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


class TorchArchive:
    """A file by `torch.save`, or a part of a file that holds one.

    `content` has a `StoredTensor` for each tensor and a `Stub` for each object of a class; `foreign` are the names of
    classes and functions that were not loaded.
    """

    def __init__(
        self, path: Path, *, start: int = 0, length: int | None = None, error: type[PapaError] = RunError
    ) -> None:
        self.path, self._error = path, error
        with file_errors(path, error=error, kind=KIND), path.open("rb") as file:
            self._identity = identity_of(file)
            size = os.fstat(file.fileno()).st_size
            length = size - start if length is None else length
            if not 0 <= start <= start + length <= size:
                raise ValueError(f"{length:,} bytes from {start:,} on are needed, it has {size:,}")
            self._records, pickled = _read_archive(path, _Window(file, start, length), start, error)
            self._max_bytes = max(length, 1 << 20)
            self.content, self.foreign = load_inert(pickled, _KNOWN, _record_of)
        self._flat = lru_cache(maxsize=1)(self._read_strided)

    def check(self, tensor: StoredTensor) -> None:
        """Raise a `ValueError` unless the tensor is within its record, and not much larger than the archive."""
        _, num_bytes = self._records[tensor.record]
        if (tensor.offset + tensor.span) * tensor.dtype.itemsize > num_bytes or tensor.offset < 0:
            raise ValueError("a tensor is larger than its record")
        if tensor.info.num_bytes > self._max_bytes:
            raise ValueError("a tensor repeats its numbers and is larger than the file")

    def part(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Some elements of the flattened tensor."""
        if tensor.is_contiguous:
            return self._read(tensor, tensor.offset + start, stop - start)
        return self._flat(tensor)[start:stop]

    def _read_strided(self, tensor: StoredTensor) -> Tensor:
        block = self._read(tensor, tensor.offset, tensor.span)
        return block.as_strided(tensor.shape, tensor.stride).reshape(-1)

    def _read(self, tensor: StoredTensor, first: int, count: int) -> Tensor:
        position = self._records[tensor.record][0] + first * tensor.dtype.itemsize
        return read_block(self.path, position, count, tensor.dtype, identity=self._identity, error=self._error)


class _Window:
    """A part of an open file, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("a position before the beginning")
        self._position = origin + offset
        return self._position

    def read(self, count: int = -1) -> bytes:
        left = max(self._length - self._position, 0)
        self._file.seek(self._start + self._position)
        data = self._file.read(left if count < 0 else min(count, left))
        self._position += len(data)
        return data


def _read_archive(
    path: Path, window: _Window, start: int, error: type[PapaError]
) -> tuple[dict[str, tuple[int, int]], bytes]:
    """The position and size of each record, and the pickle."""
    try:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise error(f"{path} is compressed, expected a file by torch.save, which is not: save it again")
            names = {entry.filename.partition("/")[2]: entry for entry in entries}
            if "constants.pkl" in names:
                raise error(f"{path} is a TorchScript program, expected weights: save its state dict")
            if "data.pkl" not in names:
                raise error(f"{path} is a zip archive, but not by torch.save: it has no data.pkl")
            order = archive.read(names["byteorder"]).decode() if "byteorder" in names else "little"
            if order != sys.byteorder:
                raise error(f"{path} has numbers in {order}-endian order, this machine has {sys.byteorder}-endian")
            records = {}
            for name, entry in names.items():
                window.seek(entry.header_offset + 26)
                lengths = window.read(4)
                skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                position = entry.header_offset + LOCAL_HEADER_BYTES + skipped
                if position + entry.file_size > window.seek(0, os.SEEK_END):
                    raise ValueError("a record is longer than the file")
                records[name] = (start + position, entry.file_size)
            return records, archive.read(names["data.pkl"])
    except (zipfile.BadZipFile, NotImplementedError, zipfile.LargeZipFile, UnicodeError, OverflowError) as cause:
        raise ValueError(cause) from cause


def _record_of(pid: Any) -> _Record:
    """A storage, from what `torch.save` writes in its place: ("storage", type, name, device, number of elements)."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
        raise ValueError("a storage of an unknown kind")
    return _Record(f"data/{pid[2]}", pid[1])


def _tensor(record: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    numbers = [offset, *_size(shape), *_size(stride)]
    if not isinstance(record, _Record) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a tensor of an unknown kind")
    if len(shape) != len(stride):
        raise ValueError("a tensor with another number of strides than of dimensions")
    return StoredTensor(record.name, record.dtype, offset, tuple(shape), tuple(stride))


def _tensor_of_dtype(record: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    """A tensor whose dtype has no storage type of its own: (requires_grad, hooks, dtype, metadata) follow."""
    if not isinstance(record, _Record) or not isinstance(rest[2], torch.dtype):
        raise ValueError("a tensor of an unknown kind")
    return _tensor(_Record(record.name, rest[2]), offset, shape, stride)


def _first(value: Any, *_: Any) -> Any:
    return value


def _of_type(rebuild: Any, _type: Any, args: Any, _state: Any) -> Any:
    """A tensor with attributes, or of a subclass; that of a foreign subclass stays a stub."""
    return rebuild(*args) if rebuild in (_tensor, _tensor_of_dtype, _first) else Stub(rebuild)


def _size(shape: Any = ()) -> tuple[Any, ...]:
    if not isinstance(shape, tuple | list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a shape of an unknown kind")
    return tuple(shape)


_KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "collections.OrderedDict": lambda: OrderedDict(),
    "torch.Size": _size,
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
}
"""What stands for the names that state dicts consist of."""
