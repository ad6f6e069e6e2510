"""Opening weights by path: files, folders of many kinds, and those that hold several networks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TypedDict

from papa.errors import SoupError
from papa.files.distributed import METADATA, distributed_content
from papa.files.state_dicts import NamedTensor
from papa.files.weights import Content, PathLike, WeightsFile, file_content
from papa.storage import file_errors, read_json, validated

WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
"""The weights of a directory that is not sharded."""
INDEX_SUFFIX = ".index.json"


def open_all(paths: Iterable[PathLike], *, key: str | None = None) -> list[WeightsFile]:
    """Open files without reading their numbers.

    Takes safetensors files; index files, or directories that hold one; PyTorch files; distributed checkpoints. What
    holds several networks stands for all of them: a directory that Accelerate saved several models to, a file of a
    wrapper's state dict. The key is the place of the weights in a file, see
    `papa.files.state_dicts.find_networks`.
    """
    return [weights for path in paths for weights in _open(Path(path), key)]


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
    if not path.is_dir():
        return _content(path).networks(key)
    if (path / METADATA).is_file():
        return distributed_content(path).networks(key)
    return [weights for file in _files_in(path) for weights in _content(file).networks(key)]


def _content(path: Path) -> Content:
    if path.name == METADATA and path.is_file():
        return distributed_content(path.parent)
    return _sharded_content(path) if path.name.endswith(INDEX_SUFFIX) and path.is_file() else file_content(path)


def _files_in(directory: Path) -> list[Path]:
    """The files to open in a directory: the index or the one file, or those that Accelerate saved several models to."""
    indices = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        listing = ", ".join(index.name for index in indices)
        raise SoupError(f"{directory} has several indices ({listing}): name the one you mean")
    if indices:
        return indices
    for name in WHOLE_NAMES:
        file = directory / name
        if file.is_file():
            return [file, *_more_models(file)]
    raise SoupError(
        f"{directory} holds no weights: expected an index (*{INDEX_SUFFIX}), {', '.join(WHOLE_NAMES[:2])}, an adapter "
        "or a distributed checkpoint; name the file you mean"
    )


def _more_models(file: Path) -> list[Path]:
    """model_1.safetensors, model_2.safetensors and so on, beside model.safetensors."""
    numbers = {}
    for other in file.parent.glob(f"{file.stem}_*{file.suffix}"):
        found = re.fullmatch(rf"{re.escape(file.stem)}_(\d+)", other.stem)
        if found is not None:
            numbers[int(found[1])] = other
    return [numbers[number] for number in sorted(numbers)]


class Index(TypedDict):
    """What the index of a sharded checkpoint holds."""

    weight_map: dict[str, str]


def _sharded_content(index: Path) -> Content:
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
        shards[file] = file_content(index.parent / file).shard()
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise SoupError(f"{index} says that '{name}' is in {file}, but it is not: the shards are of another index")
    return Content(
        index,
        {name: NamedTensor(name, shards[file].tensors[name]) for name, file in weight_map.items()},
        lambda tensor, start, stop: shards[weight_map[tensor.name]].part(tensor.name, start, stop),
        [file for shard in shards.values() for file in shard.files],
        [note for shard in shards.values() for note in shard.notes],
    )
