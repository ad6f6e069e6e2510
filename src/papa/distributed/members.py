"""A group of papa's own, with one member per process, that no other library sees.

Frameworks that find the default process group of `torch.distributed`, or `RANK` and `WORLD_SIZE` in the environment,
take members for copies of one network: they average their gradients, save rank 0 only, and scale learning rates. So
members are connected by a process group that is not registered with `torch.distributed`, over a TCP store, and the
processes know each other from variables of papa's own, which `papa.member` sets.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from papa.core.group import Group
from papa.distributed.asynchronous import PublishedFiles
from papa.distributed.collectives import OwnGroup, own_groups
from papa.distributed.group import DistributedGroup
from papa.distributed.torchrun import agree_on_session, rank_of_torchrun
from papa.errors import ConfigError, LostError
from papa.member import MEMBER, MEMBERS, PUBLISHED, STORE, STORE_RUNS

CONNECT_TIMEOUT = datetime.timedelta(minutes=10)
"""How long a member waits for the others to start."""

COLLECTIVE_TIMEOUT = datetime.timedelta(days=7)
"""How long a member waits for another, which may train or evaluate much longer; one that died is noticed at once."""

_connected: dict[tuple[object, ...], DistributedGroup] = {}
"""The groups of this process by what they were made from: connections are opened once."""


def member_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The index of this process's member and the number of members; None if `papa.member` did not start it.

    Example:
        >>> member_of_environment({"PAPA_MEMBER": "1", "PAPA_MEMBERS": "3"})
        (1, 3)
        >>> member_of_environment({}) is None
        True
    """
    if MEMBER not in environment or MEMBERS not in environment:
        return None
    member, num_members = environment[MEMBER], environment[MEMBERS]
    if not (member.isdecimal() and num_members.isdecimal() and int(member) < int(num_members)):
        raise ConfigError(
            f"{MEMBER} is '{member}' and {MEMBERS} '{num_members}', expected an index and a number of members"
        )
    return int(member), int(num_members)


def group_of_environment(*, exchange: str = "exact") -> DistributedGroup:
    """The group of the members that `papa.member` started; `exchange` is one of `papa.distributed.group.EXCHANGES`."""
    found = member_of_environment()
    if found is None or STORE not in os.environ:
        raise ConfigError(
            "this process is not one of several members: start it with torchrun --nproc-per-node 3 -m papa.member "
            "train.py, or pass a group"
        )
    data_group = None
    if dist.is_initialized():
        data_group = dist.group.WORLD if dist.get_world_size() > 1 else None
    elif "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this process is one of {os.environ['WORLD_SIZE']} that train one member, and not connected with the "
            "others: call torch.distributed.init_process_group() before it joins the population"
        )
    return _group_at(*found, os.environ[STORE], exchange, data_group, os.environ.get(STORE_RUNS) == "1")


def group_of_process(*, exchange: str = "exact") -> DistributedGroup:
    """The group of the members that `papa.member` started, or of the processes of torchrun, with one member each."""
    rank = None if MEMBER in os.environ else rank_of_torchrun()
    if rank is None:
        return group_of_environment(exchange=exchange)
    num_ranks, address = os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]
    host = "127.0.0.1" if os.environ.get("LOCAL_WORLD_SIZE") == num_ranks else address
    is_store_running = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _group_at(rank, int(num_ranks), f"{host}:{os.environ['MASTER_PORT']}", exchange, None, is_store_running)


def _group_at(
    member: int,
    num_members: int,
    address: str,
    exchange: str,
    data_group: dist.ProcessGroup | None,
    is_store_running: bool,
) -> DistributedGroup:
    key = (member, num_members, address, exchange)
    if key not in _connected:
        _connected[key] = connect_members(
            member=member,
            num_members=num_members,
            address=address,
            exchange=exchange,
            data_group=data_group,
            is_store_running=is_store_running,
        )
    return _connected[key]


def published_of_environment() -> tuple[PublishedFiles, int, int]:
    """Where the asynchronous members that `papa.member` started publish; this member; their number."""
    found = member_of_environment()
    if PUBLISHED not in os.environ or found is None:
        raise ConfigError(
            "this process is not one of several asynchronous members: start it with torchrun --nproc-per-node 3 "
            "-m papa.member --asynchronous DIR train.py"
        )
    files = PublishedFiles(os.environ[PUBLISHED])
    files.remove_unfinished(found[0])
    return files, *found


def start_of(group: Group) -> str:
    """What tells this start of a group's processes from earlier ones, where papa connected them; else nothing."""
    processes = group.process_group if isinstance(group, DistributedGroup) else None
    return own_groups[processes].start if processes is not None and processes in own_groups else ""


def connect_members(
    *,
    member: int,
    num_members: int,
    address: str,
    exchange: str = "exact",
    data_group: dist.ProcessGroup | None = None,
    is_store_running: bool = False,
) -> DistributedGroup:
    """Connect this process, which trains one member, with those of the other members; all must call it.

    Args:
        member: the index of this process's member.
        num_members: the number of members.
        address: host and port of the store that processes connect to; that of member 0, which runs it.
        exchange: how weights travel; see `papa.distributed.group.EXCHANGES`.
        data_group: the processes that train this member, where there are several: each is connected with those of the
            same rank that train other members.
        is_store_running: whether another process runs the store, as torchrun does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"the address is '{address}', expected host and port, such as 127.0.0.1:29400")
    rank = 0 if data_group is None else data_group.rank()
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            int(port),
            is_master=member == 0 and rank == 0 and not is_store_running,
            timeout=CONNECT_TIMEOUT,
            wait_for_workers=False,
        )
        shared = PrefixStore(f"papa/{rank}", store)
        # Members that were started again must not read the messages of those before.
        start = agree_on_session(shared, member, num_members, timeout=CONNECT_TIMEOUT)
        group = open_group(PrefixStore(start, shared), member, num_members, hostname=host, start=start)
        return DistributedGroup(group, exchange=exchange, data_group=data_group)
    except RuntimeError as error:
        raise LostError(
            f"member {member} cannot connect to the other members at {address}: are all {num_members} started, and can "
            "this machine reach that address?"
        ) from error


def open_group(store: Store, rank: int, num_ranks: int, *, hostname: str, start: str) -> ProcessGroup:
    """A process group over a store that is not registered with `torch.distributed`; all its processes must call it.

    On one machine they use the loopback interface, whatever its name resolves to.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = COLLECTIVE_TIMEOUT
    is_local = hostname in ("127.0.0.1", "localhost")
    options._devices = [
        ProcessGroupGloo.create_device(hostname=hostname) if is_local else ProcessGroupGloo.create_default_device()
    ]
    gloo = ProcessGroupGloo(store, rank, num_ranks, options)
    group = ProcessGroup(store, rank, num_ranks)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)

    def register(backend: str) -> None:
        if backend == "gloo":
            group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.GLOO, gloo)
            return
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, num_ranks, options)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)

    own_groups[group] = OwnGroup(start, register)
    return group
