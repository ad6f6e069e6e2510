"""Weights in files behind one interface: dtypes and shapes, and reading a part of a tensor."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from papa.errors import SoupError
from papa.files.state_dicts import NamedTensor, find_networks, info_of, tensors_in
from papa.files.torch_archive import StoredTensor, TorchArchive
from papa.storage import file_errors
from papa.storage.tensors import TensorFile, TensorInfo

PathLike: TypeAlias = str | os.PathLike[str]

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Suffixes that only files of `torch.save` have."""
OLD_TORCH = b"\x80\x02\x8a\x0a"
"""How PyTorch's old format begins."""
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
"""What training scripts save with their weights, and what runs no code when it is loaded from the old format."""


class WeightsFile:
    """Named tensors that stay on disk until a part of one is read.

    `part` gives the elements of a flattened tensor, from its name, the first and the last (exclusive) element. `files`
    are those it consists of; `notes` say what a user should know about how it was read; `label` says which of several
    networks in a file it is.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        part: Callable[[str, int, int], Tensor],
        files: Sequence[Path] = (),
        notes: Sequence[str] = (),
        label: str = "",
    ) -> None:
        self.path, self.tensors, self.part = path, dict(tensors), part
        self.files, self.notes, self.label = tuple(files), tuple(notes), label

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        info = self.tensors[name]
        return self.part(name, 0, info.numel).reshape(info.shape)


@dataclass(frozen=True)
class Content:
    """What a file holds, as nested mappings and lists, and how a part of one of its tensors is read."""

    path: Path
    value: Any
    part: Callable[[Any, int, int], Tensor]
    files: Sequence[Path]
    notes: Sequence[str] = ()

    def networks(self, key: str | None) -> list[WeightsFile]:
        """The network that it holds, or several; see `find_networks`."""
        found, notes = find_networks(self.path, self.value, key)
        weights = []
        for network in found:
            if not network.tensors:
                raise SoupError(f"{self.path} holds no tensor, expected the weights of a network")
            weights.append(self._weights(network.tensors, notes, network.label))
        return weights

    def shard(self) -> WeightsFile:
        """All tensors under the names that they have in the file, as an index has them."""
        return self._weights(tensors_in(self.path, self.value))

    def _weights(self, tensors: Mapping[str, Any], notes: Sequence[str] = (), label: str = "") -> WeightsFile:
        path = Path(f"{self.path}:{label}") if label else self.path
        infos = {name: info_of(tensor) for name, tensor in tensors.items()}

        def part(name: str, start: int, stop: int) -> Tensor:
            return self.part(tensors[name], start, stop)

        return WeightsFile(path, infos, part, self.files, [*self.notes, *notes], label)


def weights_in_memory(path: Path, tensors: Mapping[str, Tensor]) -> WeightsFile:
    """Tensors in memory."""
    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    flat = _flattener()
    return WeightsFile(path, infos, lambda name, start, stop: flat(tensors[name])[start:stop])


def _flattener() -> Callable[[Tensor], Tensor]:
    """Flattens tensors; one that is not contiguous is copied once."""
    return lru_cache(maxsize=1)(lambda tensor: tensor.detach().reshape(-1))


def safetensors_content(path: Path) -> Content:
    """The content of a safetensors file."""
    file = TensorFile(path, error=SoupError)
    if not file.tensors:
        raise SoupError(f"{path} holds no tensor, expected the weights of a network")
    tensors = {name: NamedTensor(name, info) for name, info in file.tensors.items()}
    return Content(path, tensors, lambda tensor, start, stop: file.part(tensor.name, start, stop), [path])


def safetensors_weights(path: Path) -> WeightsFile:
    """The weights in one safetensors file, as one network."""
    (weights,) = safetensors_content(path).networks(".")
    return weights


def file_content(path: Path) -> Content:
    """The content of one file: of safetensors, or by `torch.save`."""
    if not path.is_file():
        raise SoupError(f"there is no file {path}: name a file of weights, or a directory that holds one")
    with file_errors(path, error=SoupError), path.open("rb") as file:
        beginning = file.read(4)
    if beginning in KINDS:
        raise SoupError(f"{path} is {KINDS[beginning]}")
    is_torch = beginning in (b"PK\x03\x04", OLD_TORCH)
    if path.suffix in TORCH_SUFFIXES and not is_torch:
        raise SoupError(f"{path} is not a valid PyTorch file: it does not begin as torch.save begins one")
    if path.suffix == ".safetensors" or not is_torch:
        return safetensors_content(path)
    return _old_content(path) if beginning == OLD_TORCH else archive_content(path)


def archive_content(path: Path) -> Content:
    """The content of a file by `torch.save`: only tensors and plain values, no objects of classes."""
    archive = TorchArchive(path, error=SoupError)
    notes = []
    if archive.foreign:
        more = f" and {len(archive.foreign) - 1} more" if len(archive.foreign) > 1 else ""
        notes.append(f"objects of {archive.foreign[0]}{more} were not loaded: only tensors and plain values are read")
    checked = lru_cache(maxsize=None)(archive.check)

    def part(tensor: StoredTensor, start: int, stop: int) -> Tensor:
        with file_errors(path, error=SoupError, kind="a valid PyTorch file"):
            checked(tensor)
        return archive.part(tensor, start, stop)

    return Content(path, archive.content, part, [path], notes)


def _old_content(path: Path) -> Content:
    """The content of a file in the format before PyTorch 1.6; only tensors and plain values, never code."""
    with file_errors(path, error=SoupError, kind="a valid PyTorch file"):
        try:
            with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
                value = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # PyTorch's own message explains how to load it anyway, which is no good advice.
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = f", such as {found[1]}," if found else ""
            raise SoupError(
                f"{path} holds more than tensors and plain values{what} or is damaged, and nothing that could run code "
                "is loaded: save its state dict alone"
            ) from error

    flat = _flattener()
    note = "in PyTorch's old format, which is read as a whole: memory holds all of it"
    return Content(path, value, lambda tensor, start, stop: flat(tensor)[start:stop], [path], [note])
