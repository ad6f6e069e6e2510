"""Refuses members that a wrapper would train together, such as `DistributedDataParallel` over several members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn

from papa.core.group import Group
from papa.distributed.collectives import MultiProcessGroup, all_gather_object
from papa.errors import MemberError


def check_wrappers(models: Sequence[nn.Module], group: Group) -> None:
    """Raise a `MemberError` if a wrapper's processes hold different members: it would average their gradients.

    All processes that hold the population must call it.
    """
    if not isinstance(group, MultiProcessGroup):
        return
    for model in models:
        for processes, name in {processes: name for name, processes in _wrappers(model)}.items():
            _check(name, processes, group)


def _wrappers(model: nn.Module) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """The name and the process group of everything that trains a module on several processes."""
    for module in model.modules():
        processes = getattr(module, "process_group", None)  # DistributedDataParallel, FullyShardedDataParallel
        if isinstance(processes, dist.ProcessGroup):
            yield type(module).__name__, processes
    for mesh in {parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")}:
        for processes in mesh.get_all_groups():
            yield "fully_shard", processes


def _check(name: str, processes: dist.ProcessGroup, group: MultiProcessGroup) -> None:
    if processes.size() == 1:
        return
    ranks = sorted(set(all_gather_object(group.rank, processes)))
    if len(ranks) > 1:
        raise MemberError(
            f"{name} spans the processes of several members (ranks {', '.join(map(str, ranks))} of the population): it "
            "would average their gradients and make them copies of one network. Do not wrap members; or, where several "
            "processes train one member, give it those alone: init_device_mesh(device, (members, ranks), "
            "mesh_dim_names=('population', 'data'))"
        )
