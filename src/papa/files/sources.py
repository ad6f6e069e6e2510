"""Checkpoints of every kind as one thing: names, what each tensor is, and a way to read a part of it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import re
import weakref
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from papa.errors import RunError, SoupError
from papa.files.header import TensorInfo, read_header
from papa.lab.runs import RunDirectory

PathLike: TypeAlias = str | os.PathLike[str]

STATE_KEYS = ("state_dict", "model_state_dict", "model", "ema")
"""Where a PyTorch file may keep its state dict, in the order they are looked for."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "module.")
"""What may stand before every name, from the outside in: a compiled model may be wrapped, and may wrap one."""
WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin")
"""The checkpoint of a directory that is not sharded."""
INDEX_SUFFIX = ".index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Names that only files of `torch.save` have."""
_multiarray: Any = importlib.import_module(f"numpy.{'_core' if hasattr(np, '_core') else 'core'}.multiarray")
HARMLESS: tuple[Any, ...] = (
    *(argparse.Namespace, PosixPath, np.ndarray, np.dtype),
    *(_multiarray.scalar, _multiarray._reconstruct),
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")),
)
"""What training scripts save beside their weights: options, paths and numbers of numpy, whose making runs no code."""
T = TypeVar("T")


class Checkpoint(ABC):
    """Named tensors that stay where they are until a part of one is asked for.

    Args:
        path: what messages and reports call it.
        tensors: what is in it.
        files: the files its numbers come from.
        notes: what a user should know about how it was read.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], files: Sequence[Path] = (), notes: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self.files = tuple(files)
        self.notes = tuple(notes)

    @property
    def num_bytes(self) -> int:
        """How many bytes its tensors take."""
        return sum(info.num_bytes for info in self.tensors.values())

    def close(self) -> None:  # noqa: B027
        """Let go of what is held open, if anything."""

    @abstractmethod
    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Fill `target`, flat and of the tensor's dtype, with its numbers from `start` on."""

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        info = self.tensors[name]
        flat = torch.empty(info.numel, dtype=info.dtype)
        self.read_into(name, 0, flat)
        return flat.view(info.shape)


class SafetensorsFile(Checkpoint):
    """One safetensors file, read by position and never mapped."""

    def __init__(self, path: Path, *, is_shard: bool = False) -> None:
        self._identity = _identity(os.stat(path))
        header = read_header(path)
        self._places = header if is_shard else without_prefix(header)
        self._handle: int | None = None
        self._closing: weakref.finalize[..., object] | None = None
        super().__init__(path, {name: info for name, (info, _) in self._places.items()}, [path])

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Read straight into the target's memory."""
        if not target.numel():
            return
        info, begin = self._places[name]
        position, view = begin + start * info.dtype.itemsize, memoryview(bytes_of(target))
        try:
            handle = self._opened()
            if _identity(os.fstat(handle)) != self._identity:
                raise SoupError(f"{self.path} changed while it was read: start again when it is at rest")
            while view:
                count = os.preadv(handle, [view], position)
                if not count:
                    raise SoupError(f"{self.path} ended while '{name}' was read: it was cut short")
                position, view = position + count, view[count:]
        except OSError as error:
            raise SoupError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _opened(self) -> int:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY)
            self._closing = weakref.finalize(self, os.close, self._handle)
        return self._handle

    def close(self) -> None:
        """Let go of the file until it is read again."""
        if self._closing is not None:
            self._closing()
        self._handle = self._closing = None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a flat tensor as an array of bytes."""
    return tensor.view(torch.uint8).numpy()


class TensorDict(Checkpoint):
    """Tensors that are in memory, or mapped from a file of PyTorch."""

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor], files: Sequence[Path] = (), notes: Sequence[str] = ()
    ) -> None:
        infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        super().__init__(path, infos, files, notes)
        self._tensors = dict(tensors)
        self._flat: tuple[str, Tensor] | None = None

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Copy from where the tensor lies; one that is not contiguous is brought into order once."""
        if self._flat is None or self._flat[0] != name:
            self._flat = name, self._tensors[name].detach().reshape(-1)
        target.copy_(self._flat[1][start : start + target.numel()])


class Sharded(Checkpoint):
    """Several files of which an index says which tensor is in which."""

    def __init__(self, path: Path, shards: Mapping[str, Checkpoint], weight_map: Mapping[str, str]) -> None:
        self._current: Checkpoint | None = None
        self._shard_of = {name: shards[file] for name, file in weight_map.items()}
        tensors = {name: shard.tensors[name] for name, shard in self._shard_of.items()}
        files = [file for shard in shards.values() for file in shard.files]
        super().__init__(path, tensors, files, [note for shard in shards.values() for note in shard.notes])

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Read from the shard that has it; one shard is open at a time."""
        shard = self._shard_of[name]
        if shard is not self._current:
            self.close()
            self._current = shard
        shard.read_into(name, start, target)

    def close(self) -> None:
        """Let go of the shard that is open."""
        if self._current is not None:
            self._current.close()


def open_checkpoints(paths: Iterable[PathLike], *, key: str | None = None) -> list[Checkpoint]:
    """Open checkpoints without reading their numbers; a run directory of papa stands for all its members.

    Args:
        paths: safetensors files; index files, or directories that hold one; PyTorch files; run directories.
        key: where in PyTorch files the state dict is, names joined by dots; None to look in the usual places.
    """
    found: list[Checkpoint] = []
    for path in map(Path, paths):
        if path.is_dir() and is_run(path):
            found += [SafetensorsFile(file) for file in member_files(path)]
        else:
            found.append(open_checkpoint(path, key=key))
    return found


def open_checkpoint(path: PathLike, *, key: str | None = None, is_shard: bool = False) -> Checkpoint:
    """Open one checkpoint without reading its numbers; see `open_checkpoints`.

    Args:
        path: where it is.
        key: see `open_checkpoints`.
        is_shard: whether an index names its tensors: then their names stay as they are.
    """
    path = Path(path)
    if path.is_dir():
        if is_run(path):
            raise SoupError(
                f"{path} is a run directory, expected one checkpoint: name {path / 'soup.safetensors'} or one of "
                f"{path / 'members'}"
            )
        path = _inside(path)
    if not path.is_file():
        raise SoupError(f"there is no checkpoint {path}: name a file, or a directory that holds one")
    if path.name.endswith(INDEX_SUFFIX):
        return _open_sharded(path, key)
    is_torch = _looks_like_torch(path)
    if path.suffix in TORCH_SUFFIXES and not is_torch:
        raise SoupError(f"{path} is not a whole PyTorch file: it does not begin as torch.save begins one")
    if path.suffix == ".safetensors" or not is_torch:
        checkpoint: Checkpoint = SafetensorsFile(path, is_shard=is_shard)
    else:
        checkpoint = _open_torch(path, key, is_shard=is_shard)
    if not checkpoint.tensors:
        raise SoupError(f"{path} holds no tensor, expected the weights of a network")
    return checkpoint


def is_run(path: Path) -> bool:
    """Whether a directory is of `papa run`; hubs too call a file config.json."""
    run = RunDirectory(path)
    return run.config.is_file() and (run.members.is_dir() or run.metrics.is_file())


def member_files(path: Path) -> list[Path]:
    """The members of a run that came to its end."""
    run = RunDirectory(path)
    num_members = run.read_config().get("members")
    files = sorted(run.members.glob("[0-9]*.safetensors"))
    if not run.is_finished:
        raise RunError(f"{path} holds an unfinished run: finish it with papa resume {path}")
    if len(files) != num_members:
        raise RunError(
            f"{path} has {len(files)} of the {num_members} members its config names: name the files you want instead"
        )
    return files


def _inside(directory: Path) -> Path:
    """The checkpoint of a directory: its index, or its only file under a usual name."""
    indices = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        listing = ", ".join(index.name for index in indices)
        raise SoupError(f"{directory} has several indices ({listing}): name the one you mean")
    for file in [*indices, *(directory / name for name in WHOLE_NAMES)]:
        if file.is_file():
            return file
    raise SoupError(
        f"{directory} holds no checkpoint: expected an index (*{INDEX_SUFFIX}), {' or '.join(WHOLE_NAMES)}, or a run "
        "of papa; name the file you mean"
    )


def _open_sharded(index: Path, key: str | None) -> Sharded:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        entries = [(str(name), str(file)) for name, file in weight_map.items()]
    except OSError as error:
        raise SoupError(f"cannot read {index}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SoupError(f"{index} is not an index: expected JSON with a weight_map of tensors and files") from error
    if not entries:
        raise SoupError(f"{index} names no tensor, expected the weights of a network")
    shards: dict[str, Checkpoint] = {}
    for file in dict.fromkeys(file for _, file in entries):
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or "\\" in file or "\0" in file or file.endswith(INDEX_SUFFIX):
            raise SoupError(f"{index} names the file '{file}', expected one that lies beside the index")
        if not (index.parent / file).is_file():
            raise SoupError(f"{index} names the file {file}, which is not there: fetch the missing shard")
        shards[file] = open_checkpoint(index.parent / file, key=key, is_shard=True)
    for name, file in entries:
        if name not in shards[file].tensors:
            raise SoupError(f"{index} says that '{name}' is in {file}, but it is not: the shards are of another index")
    return Sharded(index, shards, dict(entries))


def _looks_like_torch(path: Path) -> bool:
    """Whether a file begins as `torch.save` begins one: a zip archive, or its old form's mark."""
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise SoupError(f"cannot read {path}: {error.strerror or error}") from error
    return begin in (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def _open_torch(path: Path, key: str | None, *, is_shard: bool) -> TensorDict:
    value, notes = _load_torch(path)
    state, where = _state_in(path, value, key)
    if where is not None:
        notes.append(where)
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise SoupError(f"{path} has '{name}' as a {kind} tensor, expected plain ones: save it as such")
    return TensorDict(path, tensors if is_shard else without_prefix(tensors), [path], notes)


def _load_torch(path: Path) -> tuple[Any, list[str]]:
    """What a PyTorch file holds, mapped where its form allows; only tensors and plain values, never code."""
    is_mapped = zipfile.is_zipfile(path)
    notes = [] if is_mapped else ["in PyTorch's old form, which is read as a whole: memory holds all of it"]
    try:
        with torch.serialization.safe_globals(list(HARMLESS)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped), notes
    except pickle.UnpicklingError as error:
        # PyTorch's own message goes on to explain how to load it all the same, which is no advice of ours.
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f", such as {found[1]}," if found else ""
        raise SoupError(
            f"{path} holds more than tensors and plain values{what} or is damaged, and nothing that could run code is "
            "loaded: save its state dict alone"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SoupError(f"{path} is not a whole PyTorch file: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The first sentence of what PyTorch says."""
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0][:200]


def _state_in(path: Path, value: Any, key: str | None) -> tuple[Mapping[str, Any], str | None]:
    """The state dict in what a file holds, and a note where there was a choice."""
    if key is not None:
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                there = f"; it has {_listing(value)}" if isinstance(value, Mapping) else ""
                raise SoupError(f"{path} has nothing under '{key}'{there}: choose another --key")
            value = value[part]
        if not _has_tensors(value):
            raise SoupError(f"{path} has no state dict under '{key}': choose another --key")
        return value, None
    if not isinstance(value, Mapping):
        raise SoupError(f"{path} holds a {type(value).__name__}, expected a state dict")
    present = [name for name in STATE_KEYS if _has_tensors(value.get(name))]
    if present:
        others = [name for name in value if name != present[0] and _has_tensors(value[name])]
        note = f"took '{present[0]}', there is also {', '.join(map(str, others))}: --key chooses"
        return value[present[0]], note if others else None
    if not _has_tensors(value):
        raise SoupError(
            f"{path} has no state dict: expected tensors, or one under {', '.join(STATE_KEYS)}; it has "
            f"{_listing(value)}: name it with --key"
        )
    return value, None


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(part, Tensor) for part in value.values())


def _listing(value: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(value)[:10])) or "nothing"


def without_prefix(tensors: Mapping[str, T]) -> dict[str, T]:
    """What lies under names, without what data parallel, averaged and compiled models put before them."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}
    is_wrapped = False
    for prefix in WRAPPER_PREFIXES:
        if kept and all(name.startswith(prefix) for name in kept):
            kept, is_wrapped = {name.removeprefix(prefix): tensor for name, tensor in kept.items()}, True
    return kept if is_wrapped else dict(tensors)
