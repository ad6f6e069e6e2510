"""Whole networks from members that several ranks train: gathered from their shards, or written shard by shard."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from papa.core.group import Group
from papa.core.layout import is_sharded
from papa.errors import SoupError


def inner_module(model: nn.Module) -> nn.Module:
    """The network inside of `DistributedDataParallel` and `torch.compile`, whose tensors have their plain names."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def like(local: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that is sharded as `tensor` is, made of this rank's part of it."""
    if not is_sharded(tensor):
        return local
    from torch.distributed.tensor import DTensor  # takes long to import, and is there where something is sharded

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, on all ranks that hold one; they must call it together."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found


def is_first_data_rank(group: Group) -> bool:
    """Whether this process is the first of those that train its member."""
    data_group: dist.ProcessGroup | None = getattr(group, "data_group", None)
    return data_group is None or data_group.rank() == 0


def save_distributed(directory: Path, state: Mapping[str, Any], group: Group) -> None:
    """Write a distributed checkpoint: every rank of one member writes its shards; these ranks must call it together.

    The directory must not exist. Tensors are sharded or not; `group` is that of the population.
    """
    if directory.exists():
        raise SoupError(f"{directory} exists already, expected a new directory for a distributed checkpoint")
    from torch.distributed.checkpoint.state_dict_saver import save  # takes long to import

    partial = directory.with_name(f".{directory.name}.partial")
    data_group: dist.ProcessGroup | None = getattr(group, "data_group", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing group of a single process, and about files to replace
            save(dict(state), checkpoint_id=partial, process_group=data_group, no_dist=data_group is None)
        if is_first_data_rank(group):
            partial.rename(directory)
    except OSError as error:
        if is_first_data_rank(group):
            shutil.rmtree(partial, ignore_errors=True)
        raise SoupError(f"cannot write {directory}: {error.strerror}") from error
