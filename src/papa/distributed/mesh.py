"""Converts the process groups and device meshes of `torch.distributed` to a `Group`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from papa.core.group import Group, LocalGroup
from papa.distributed.group import DistributedGroup
from papa.errors import ConfigError, MemberError

POPULATION = "population"


def as_group(group: Any, *, exchange: str = "exact") -> Group:
    """The group for any object that says where members are.

    Args:
        group: None when this process holds all members; a `Group`; a process group of `torch.distributed`, each rank of
            which holds its own members; or a device mesh with a dimension called `population` and at most one other,
            along which several ranks train one member.
        exchange: how weights travel; see `papa.distributed.EXCHANGES`.
    """
    if group is None:
        _check_single_process()
        return LocalGroup()
    if isinstance(group, DeviceMesh):
        return _from_mesh(group, exchange)
    if isinstance(group, dist.ProcessGroup):
        return DistributedGroup(group, exchange=exchange)
    if not hasattr(group, "check_same"):
        raise MemberError(
            f"group is a {type(group).__name__}, expected a process group or device mesh of torch.distributed, or "
            "one of papa.distributed, such as papa.core.group.LocalGroup"
        )
    found: Group = group
    return found


def _check_single_process() -> None:
    """Raise under torchrun before `init_process_group`, where `dist.group.WORLD` is None too."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and num_ranks != "1" and not dist.is_initialized():
        raise ConfigError(
            f"group is None in one of {num_ranks} processes that torchrun started: call torch.distributed."
            "init_process_group() first and pass torch.distributed.group.WORLD, or pass papa.core.group.LocalGroup() "
            "for a population of this process alone"
        )


def _from_mesh(mesh: DeviceMesh, exchange: str) -> DistributedGroup:
    names = mesh.mesh_dim_names or ()
    others = [name for name in names if name != POPULATION]
    if POPULATION not in names or len(others) > 1:
        found = ", ".join(names) if names else "no names"
        raise ConfigError(
            f"the device mesh has the dimensions {found}, expected 'population' and at most one more, along which one "
            "member is trained: init_device_mesh(device, (members, ranks), mesh_dim_names=('population', 'data'))"
        )
    data_group = mesh.get_group(others[0]) if others else None
    return DistributedGroup(mesh.get_group(POPULATION), exchange=exchange, data_group=data_group)
