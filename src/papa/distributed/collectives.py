"""Collectives of `torch.distributed` on Python values, and the methods that groups of several processes share."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import pickle
import re
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from papa.core.group import Group, balanced_ranges
from papa.errors import ConfigError, LostError, MemberError

T = TypeVar("T")

LOG = logging.getLogger(__name__)


CONNECTION_WORDS = re.compile(
    r"connect|connection|peer|timed? ?out|socket|broken pipe|network|remote process|remoteError|aborted", re.IGNORECASE
)
"""Words of backends about connections; gloo has no class for these errors."""


@dataclass(frozen=True)
class OwnGroup:
    """What papa must know of a process group that is not registered with `torch.distributed`."""

    start: str
    """Tells this start of its processes from earlier ones."""
    register: Callable[[str], None]
    """Lets tensors on GPUs travel by `nccl` or `gloo`; all processes must call it."""


own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, OwnGroup] = weakref.WeakKeyDictionary()
"""The process groups that only papa knows: functions of `torch.distributed` that look up a group do not find them."""


def rank_in(group: dist.ProcessGroup | None) -> int:
    """The rank of this process in a group; None for all processes."""
    return dist.get_rank() if group is None else group.rank()


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of processes of a group; None for all processes."""
    return dist.get_world_size() if group is None else group.size()


def is_connection_error(error: RuntimeError) -> bool:
    """Whether a backend reports a broken connection, and no mistake such as a device that it does not know."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return CONNECTION_WORDS.search(str(error)) is not None


@contextlib.contextmanager
def connection_errors(action: str) -> Iterator[None]:
    """Raise a `LostError` where the backend reports a broken connection during `action`."""
    try:
        yield
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        LOG.info("while %s, the backend reported: %s", action, error)
        rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise LostError(
            f"{rank} lost the connection to the other processes while {action}: one of them failed, was killed or "
            "cannot be reached; the cause is in the output of the other processes"
        ) from error


def has_nccl() -> bool:
    """Whether tensors on GPUs can travel from GPU to GPU."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def place_of(device: torch.device) -> str:
    """A name of the GPU that NCCL would use for tensors on a device, unique among all machines; empty for none."""
    if device.type != "cuda" or not has_nccl():
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def backend_for(places: Sequence[str]) -> str:
    """How tensors on accelerators travel between processes at these places: NCCL needs a GPU of its own for each.

    Example:
        >>> backend_for(["host GPU-1", "host GPU-2"]), backend_for(["host GPU-1"] * 2), backend_for(["", ""])
        ('nccl', 'gloo', 'gloo')
    """
    return "nccl" if all(places) and len(set(places)) == len(places) else "gloo"


def check_current_device(device: torch.device, current: int) -> None:
    """Raise a `ConfigError` unless the device of tensors is the current one, which NCCL uses for everything else."""
    if device.type == "cuda" and device.index not in (None, current):
        raise ConfigError(
            f"this process has its member on {device}, but its current device is cuda:{current}: call "
            f"torch.cuda.set_device({device.index}) first, since NCCL needs one GPU for each process"
        )


def disconnect() -> None:
    """Close the connections, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all processes of a group (None: of all), in rank order.

    Unlike with `torch.distributed.all_gather_object`, tensors arrive on the receiver's accelerator, not the sender's.
    """
    values = [b""] * size_of(group)
    with connection_errors("exchanging values"):
        if group in own_groups:
            values = _all_gather_bytes(dumps(value), group)
        else:
            dist.all_gather_object(values, dumps(value), group=group)
    return [pickle.loads(received) for received in values]


def _all_gather_bytes(value: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size_of(group))]
    dist.all_gather(lengths, torch.tensor([len(value)]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def dumps(value: Any) -> bytes:
    """Pickle a value so that tensors on accelerators are loaded on the reader's current device of that type."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return to_device_type, (value.detach().cpu(), value.device.type)
        return NotImplemented


def to_device_type(tensor: Tensor, device_type: str) -> Tensor:
    """The tensor on this process's current device of a type."""
    return tensor.to(torch.device(device_type))


_groups: weakref.WeakSet[MultiProcessGroup] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """Drop process groups before Python ends: a thread of gloo that still holds a tensor would abort it later."""
    for group in list(_groups):
        vars(group).clear()


class MultiProcessGroup(Group):
    """The methods that do not depend on where the rows are; a process group of None is all processes."""

    is_local = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.process_group = dist.group.WORLD if group is None else group
        _groups.add(self)
        self.rank: int = rank_in(group)
        self.num_ranks: int = size_of(group)
        self.is_leader: bool = (self.rank if group in own_groups else dist.get_rank()) == 0

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this machine."""
        return self.rank

    def local_range(self, size: int) -> range:
        return balanced_ranges(size, self.num_ranks)[self.rank]

    def local_device(self, device: torch.device) -> torch.device:
        """One accelerator for each process of a machine."""
        index: int | None = device.index
        return device if device.type == "cpu" or index is not None else torch.device(device.type, self.local_rank)

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        everyone = all_gather_object(dict(facts), self.process_group)
        is_own = self.process_group in own_groups
        ranks = list(range(self.num_ranks)) if is_own else dist.get_process_group_ranks(self.process_group)
        for rank, theirs in zip(ranks, everyone, strict=True):
            for name in sorted(everyone[0].keys() | theirs.keys()):
                found, expected = theirs.get(name, "nothing"), everyone[0].get(name, "nothing")
                if found != expected:
                    raise MemberError(f"rank {rank} has {found} as '{name}', rank {ranks[0]} has {expected}: {cure}")

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """A wrapper that spans several members, such as `DistributedDataParallel`, would average their gradients."""
        for model in models:
            for processes, name in {processes: name for name, processes in _wrappers(model)}.items():
                ranks = sorted(set(all_gather_object(self.rank, processes))) if processes.size() > 1 else []
                if len(ranks) > 1:
                    raise MemberError(
                        f"{name} spans the processes of several members (ranks {', '.join(map(str, ranks))} of the "
                        "population): it would average their gradients and make them copies of one network. Do not "
                        "wrap members; or, where several processes train one member, give it those alone: "
                        "init_device_mesh(device, (members, ranks), mesh_dim_names=('population', 'data'))"
                    )

    def all_gather(self, values: list[T]) -> list[T]:
        return [value for part in all_gather_object(values, self.process_group) for value in part]

    def all_max(self, *values: float) -> tuple[float, ...]:
        return all_max(values, self.process_group)

    def barrier(self) -> None:
        with connection_errors("waiting at a barrier"):
            group = self.process_group
            if group is not None and group in own_groups:
                group.barrier().wait()
            else:
                dist.barrier(group)


def all_max(values: tuple[float, ...], group: dist.ProcessGroup | None) -> tuple[float, ...]:
    """The maximum of each value over the processes of a group."""
    device = "cuda" if group not in own_groups and dist.get_backend(group) == "nccl" else "cpu"
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    with connection_errors("exchanging values"):
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return tuple(numbers.tolist())


def _wrappers(model: nn.Module) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """The name and the process group of everything that trains a module on several processes."""
    for module in model.modules():
        processes = getattr(module, "process_group", None)  # DistributedDataParallel, FullyShardedDataParallel
        if isinstance(processes, dist.ProcessGroup):
            yield type(module).__name__, processes
    for mesh in {parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")}:
        for processes in mesh.get_all_groups():
            yield "fully_shard", processes
