"""Weights in files of every kind behind one interface: dtypes and shapes, and reading a part of a tensor."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from papa.errors import RunError, SoupError
from papa.storage import TensorFile, TensorInfo, file_errors, is_run, read_json, read_object, validated

PathLike: TypeAlias = str | os.PathLike[str]

STATE_KEYS = ("state_dict", "model_state_dict", "model", "ema")
"""Where a PyTorch file may keep its state dict, in the order of preference."""
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "module.")
"""What may precede every name, from the outside in: a compiled model may be wrapped, and may wrap one."""
WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin")
"""The weights of a directory that is not sharded."""
INDEX_SUFFIX = ".index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Suffixes that only files of `torch.save` have."""
_multiarray: Any = importlib.import_module(f"numpy.{'_core' if hasattr(np, '_core') else 'core'}.multiarray")
SAFE_GLOBALS: tuple[Any, ...] = (
    *(argparse.Namespace, PosixPath, np.ndarray, np.dtype),
    *(_multiarray.scalar, _multiarray._reconstruct),
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")),
)
"""What training scripts save with their weights, and what runs no code when it is loaded."""
T = TypeVar("T")


class WeightsFile:
    """Named tensors that stay on disk until a part of one is read.

    `part` gives the elements of a flattened tensor, from its name, the first and the last (exclusive) element. `files`
    are those it consists of; `notes` say what a user should know about how it was read.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        part: Callable[[str, int, int], Tensor],
        files: Sequence[Path] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.path, self.tensors, self.part = path, dict(tensors), part
        self.files, self.notes = tuple(files), tuple(notes)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        info = self.tensors[name]
        return self.part(name, 0, info.numel).reshape(info.shape)


def safetensors_weights(path: Path, *, is_shard: bool = False) -> WeightsFile:
    """The weights in one safetensors file."""
    file = TensorFile(path, error=SoupError)
    names = {name: name for name in file.tensors}
    stored = names if is_shard else without_prefix(names)
    infos = {name: file.tensors[stored[name]] for name in stored}
    return WeightsFile(path, infos, lambda name, start, stop: file.part(stored[name], start, stop), [path])


def weights_in_memory(
    path: Path, tensors: Mapping[str, Tensor], files: Sequence[Path] = (), notes: Sequence[str] = ()
) -> WeightsFile:
    """Tensors in memory, or mapped from a PyTorch file."""

    @lru_cache(maxsize=1)  # a tensor that is not contiguous is made so once
    def flat(name: str) -> Tensor:
        return tensors[name].detach().reshape(-1)

    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    return WeightsFile(path, infos, lambda name, start, stop: flat(name)[start:stop], files, notes)


def open_all(paths: Iterable[PathLike], *, key: str | None = None) -> list[WeightsFile]:
    """Open files without reading their numbers; a run directory of papa stands for all its members.

    Args:
        paths: safetensors files; index files, or directories that hold one; PyTorch files; run directories.
        key: the place of the state dict in PyTorch files, names joined by dots; None to search the usual places.
    """
    found: list[WeightsFile] = []
    for path in map(Path, paths):
        if path.is_dir() and is_run(path):
            found += [safetensors_weights(file) for file in member_files(path)]
        else:
            found.append(open_weights(path, key=key))
    return found


def open_weights(path: PathLike, *, key: str | None = None, is_shard: bool = False) -> WeightsFile:
    """Open one network's weights without reading their numbers; see `open_all`.

    Args:
        path: the file or directory.
        key: see `open_all`.
        is_shard: whether an index names its tensors, so that prefixes are kept.
    """
    path = Path(path)
    if path.is_dir():
        if is_run(path):
            raise SoupError(
                f"{path} is a run directory, expected the weights of one network: name {path / 'soup.safetensors'} or "
                f"one of {path / 'members'}"
            )
        path = _file_in(path)
    if not path.is_file():
        raise SoupError(f"there is no file {path}: name a file of weights, or a directory that holds one")
    if path.name.endswith(INDEX_SUFFIX):
        return _open_sharded(path, key)
    is_torch = _begins_like_torch(path)
    if path.suffix in TORCH_SUFFIXES and not is_torch:
        raise SoupError(f"{path} is not a valid PyTorch file: it does not begin as torch.save begins one")
    if path.suffix == ".safetensors" or not is_torch:
        weights = safetensors_weights(path, is_shard=is_shard)
    else:
        weights = _open_torch(path, key, is_shard=is_shard)
    if not weights.tensors:
        raise SoupError(f"{path} holds no tensor, expected the weights of a network")
    return weights


def member_files(path: Path) -> list[Path]:
    """The files of the members of a finished run."""
    num_members = read_object(path / "config.json").get("members")
    files = sorted((path / "members").glob("[0-9]*.safetensors"))
    if not (path / "result.json").exists():
        raise RunError(f"{path} holds an unfinished run: finish it with papa resume {path}")
    if len(files) != num_members:
        raise RunError(
            f"{path} has {len(files)} of the {num_members} members its config names: name the files you want instead"
        )
    return files


def _file_in(directory: Path) -> Path:
    """The file to open in a directory."""
    indices = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        listing = ", ".join(index.name for index in indices)
        raise SoupError(f"{directory} has several indices ({listing}): name the one you mean")
    for file in [*indices, *(directory / name for name in WHOLE_NAMES)]:
        if file.is_file():
            return file
    raise SoupError(
        f"{directory} holds no weights: expected an index (*{INDEX_SUFFIX}), {' or '.join(WHOLE_NAMES)}, or a run of "
        "papa; name the file you mean"
    )


class Index(TypedDict):
    """What the index of a sharded checkpoint holds."""

    weight_map: dict[str, str]


def _open_sharded(index: Path, key: str | None) -> WeightsFile:
    with file_errors(index, error=SoupError, kind="a valid index of shards"):
        weight_map = validated(read_json(index, error=SoupError), Index)["weight_map"]
    if not weight_map:
        raise SoupError(f"{index} names no tensor, expected the weights of a network")
    shards: dict[str, WeightsFile] = {}
    for file in dict.fromkeys(weight_map.values()):
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or "\\" in file or "\0" in file or file.endswith(INDEX_SUFFIX):
            raise SoupError(f"{index} names the file '{file}', expected a file in the directory of the index")
        if not (index.parent / file).is_file():
            raise SoupError(f"{index} names the file {file}, which does not exist: download the missing shard")
        shards[file] = open_weights(index.parent / file, key=key, is_shard=True)
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise SoupError(f"{index} says that '{name}' is in {file}, but it is not: the shards are of another index")
    return WeightsFile(
        index,
        {name: shards[file].tensors[name] for name, file in weight_map.items()},
        lambda name, start, stop: shards[weight_map[name]].part(name, start, stop),
        [file for shard in shards.values() for file in shard.files],
        [note for shard in shards.values() for note in shard.notes],
    )


def _begins_like_torch(path: Path) -> bool:
    """Whether a file begins as `torch.save` begins one: as a zip archive, or with the mark of the old format."""
    with file_errors(path, error=SoupError), path.open("rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def _open_torch(path: Path, key: str | None, *, is_shard: bool) -> WeightsFile:
    value, notes = _load_torch(path)
    state, note = _find_state(path, value, key)
    if note is not None:
        notes.append(note)
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise SoupError(f"{path} has '{name}' as a {kind} tensor, expected dense ones: save it as such")
    return weights_in_memory(path, tensors if is_shard else without_prefix(tensors), [path], notes)


def _load_torch(path: Path) -> tuple[Any, list[str]]:
    """The content of a PyTorch file, mapped if possible; only tensors and plain values, never code."""
    is_mapped = zipfile.is_zipfile(path)
    notes = [] if is_mapped else ["in PyTorch's old format, which is read as a whole: memory holds all of it"]
    with file_errors(path, error=SoupError, kind="a valid PyTorch file"):
        if is_mapped:
            _check_not_compressed(path)
        try:
            with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped), notes
        except pickle.UnpicklingError as error:
            # PyTorch's own message explains how to load it anyway, which is no good advice.
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = f", such as {found[1]}," if found else ""
            raise SoupError(
                f"{path} holds more than tensors and plain values{what} or is damaged, and nothing that could run code "
                "is loaded: save its state dict alone"
            ) from error


def _check_not_compressed(path: Path) -> None:
    """Raise for compressed archives, which `torch.save` never writes: they might unpack to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:
        raise ValueError(error) from error
    if num_bytes > path.stat().st_size:
        raise SoupError(f"{path} is compressed, expected a file by torch.save, which is not: save it again")


def _find_state(path: Path, value: Any, key: str | None) -> tuple[Mapping[str, Any], str | None]:
    """The state dict in the content of a file, and a note if there was a choice."""
    if key is not None:
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                there = f"; it has {_listing(value)}" if isinstance(value, Mapping) else ""
                raise SoupError(f"{path} has nothing under '{key}'{there}: choose another key")
            value = value[part]
        if not _has_tensors(value):
            raise SoupError(f"{path} has no state dict under '{key}': choose another key")
        return value, None
    if not isinstance(value, Mapping):
        raise SoupError(f"{path} holds a {type(value).__name__}, expected a state dict")
    present = [name for name in STATE_KEYS if _has_tensors(value.get(name))]
    if present:
        others = [name for name in value if name != present[0] and _has_tensors(value[name])]
        note = f"used '{present[0]}', the file also has {', '.join(map(str, others))}: set the key to choose"
        return value[present[0]], note if others else None
    if not _has_tensors(value):
        raise SoupError(
            f"{path} has no state dict: expected tensors, or one under {', '.join(STATE_KEYS)}; it has "
            f"{_listing(value)}: set the key to the place of the state dict"
        )
    return value, None


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(part, Tensor) for part in value.values())


def _listing(value: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(value)[:10])) or "nothing"


def without_prefix(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same values under names without the prefixes of data-parallel, averaged and compiled models."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}
    is_wrapped = False
    for prefix in WRAPPER_PREFIXES:
        if kept and all(name.startswith(prefix) for name in kept):
            kept, is_wrapped = {name.removeprefix(prefix): tensor for name, tensor in kept.items()}, True
    return kept if is_wrapped else dict(tensors)
