"""Members that several processes train: device meshes, and whole networks from shards."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel

from papa.core.group import Group
from papa.core.layout import is_sharded
from papa.distributed.group import DistributedGroup
from papa.errors import ConfigError, MemberError, SoupError

POPULATION = "population"


def group_of(group: Any) -> DistributedGroup:
    """The group for a process group or a device mesh of `torch.distributed`; see `papa.core.group.as_group`."""
    if isinstance(group, dist.ProcessGroup):
        return DistributedGroup(group)
    if not isinstance(group, DeviceMesh):
        raise MemberError(
            f"group is a {type(group).__name__}, expected a process group or device mesh of torch.distributed, or a "
            "papa.core.group.Group, such as LocalGroup"
        )
    names = group.mesh_dim_names or ()
    others = [name for name in names if name != POPULATION]
    if POPULATION not in names or len(others) > 1:
        found = ", ".join(names) if names else "no names"
        raise ConfigError(
            f"the device mesh has the dimensions {found}, expected 'population' and at most one more, along which one "
            "member is trained: init_device_mesh(device, (members, ranks), mesh_dim_names=('population', 'data'))"
        )
    data_group = group.get_group(others[0]) if others else None
    return DistributedGroup(group.get_group(POPULATION), data_group=data_group)


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


def save_distributed(directory: Path, state: Mapping[str, Any], group: Group) -> None:
    """Write a distributed checkpoint: every rank of one member writes its shards; these ranks must call it together.

    The directory must not exist. Tensors are sharded or not; `group` is that of the population.
    """
    if directory.exists():
        raise SoupError(f"{directory} exists already, expected a new directory for a distributed checkpoint")
    from torch.distributed.checkpoint.state_dict_saver import save  # takes long to import

    partial = directory.with_name(f".{directory.name}.partial")
    data_group = group.data_group if isinstance(group, DistributedGroup) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing group of a single process, and about files to replace
            save(dict(state), checkpoint_id=partial, process_group=data_group, no_dist=data_group is None)
        if group.is_first_of_member:
            partial.rename(directory)
    except OSError as error:
        if group.is_first_of_member:
            shutil.rmtree(partial, ignore_errors=True)
        raise SoupError(f"cannot write {directory}: {error.strerror}") from error
