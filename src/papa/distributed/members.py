"""A group of papa's own, with one member per process, that no other library sees.

Frameworks that find the default process group of `torch.distributed`, or `RANK` and `WORLD_SIZE` in the environment,
take members for copies of one network: they average their gradients, save rank 0 only, and scale learning rates. So
members are connected by a process group that is not registered with `torch.distributed`, over a TCP store, and the
processes know each other from variables of papa's own, which `papa each` sets.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from papa.distributed.asynchronous import PublishedFiles
from papa.distributed.collectives import OwnGroup, own_groups
from papa.distributed.group import DistributedGroup
from papa.distributed.torchrun import RENDEZVOUS_TIMEOUT, agree_on_session, rank_of_torchrun, rendezvous_errors
from papa.errors import ConfigError, LostError

MEMBER, MEMBERS, STORE, START, WEIGHTS = "PAPA_MEMBER", "PAPA_MEMBERS", "PAPA_STORE", "PAPA_START", "PAPA_WEIGHTS"
"""The environment variables of a member's process: its index, the number of members, the address of the store, the
number of this start (restarted members must not read the messages of those before), and the directory for its final
weights."""

PUBLISHED = "PAPA_PUBLISHED"
"""The environment variable with the directory in which asynchronous members publish their weights."""

SOUP = "soup"
"""The file in that directory with the path of a soup that members wrote themselves."""

CONNECT_TIMEOUT = datetime.timedelta(minutes=10)
"""How long a member waits for the others to start."""

COLLECTIVE_TIMEOUT = datetime.timedelta(days=7)
"""How long a member waits for another, which may train or evaluate much longer; one that died is noticed at once."""

_connected: dict[tuple[str, ...], DistributedGroup] = {}
"""The groups of this process by the variables they were made from: connections are opened once."""


def member_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The index of this process's member and the number of members; None if `papa each` did not start it.

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
    """The group of the members that `papa each` started; `exchange` is one of `papa.distributed.EXCHANGES`."""
    found = member_of_environment()
    if found is None or STORE not in os.environ:
        raise ConfigError(
            "this process is not one of several members: start it with `papa each --members 3 -- python train.py`, or "
            "pass a group, such as papa.distributed.connect_members(member=0, num_members=3, address='127.0.0.1:29400')"
        )
    data_group = _data_group()
    key = (*(os.environ[name] for name in (MEMBER, MEMBERS, STORE)), os.environ.get(START, "0"), exchange)
    if key not in _connected:
        member, num_members = found
        _connected[key] = connect_members(
            member=member,
            num_members=num_members,
            address=os.environ[STORE],
            session=os.environ.get(START, "0"),
            exchange=exchange,
            data_group=data_group,
            is_store_running=True,
        )
    return _connected[key]


def group_of_ranks(*, exchange: str = "exact") -> DistributedGroup:
    """The group of the processes that torchrun started, with one member each, unseen by `torch.distributed`."""
    rank = rank_of_torchrun()
    if rank is None:
        raise ConfigError(
            "this process is not one of several ranks: start it with torchrun --nproc-per-node 3 train.py"
        )
    address, port, num_ranks = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], int(os.environ["WORLD_SIZE"])
    key = ("ranks", str(rank), str(num_ranks), address, port, exchange)
    if key not in _connected:
        is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(num_ranks)
        with rendezvous_errors(address, port):
            store, _, _ = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
            own = PrefixStore(f"papa/{agree_on_session(PrefixStore('papa', store), rank, num_ranks)}", store)
            group = open_group(own, rank, num_ranks, hostname="127.0.0.1" if is_one_machine else address)
        _connected[key] = DistributedGroup(group, exchange=exchange)
    return _connected[key]


def group_of_process(*, exchange: str = "exact") -> DistributedGroup:
    """The group of the members that `papa each` or torchrun started."""
    is_of_torchrun = MEMBER not in os.environ and rank_of_torchrun() is not None
    return (group_of_ranks if is_of_torchrun else group_of_environment)(exchange=exchange)


def report_soup(path: str | os.PathLike[str]) -> None:
    """Report to `papa each`, if it started this process, where the members wrote their soup."""
    if WEIGHTS in os.environ:
        Path(os.environ[WEIGHTS], SOUP).write_text(os.fspath(path))


def published_of_environment() -> tuple[PublishedFiles, int, int]:
    """Where the members that `papa each --asynchronous` started publish; this member; their number."""
    found = member_of_environment()
    if PUBLISHED not in os.environ or found is None:
        raise ConfigError(
            "this process is not one of several asynchronous members: start it with "
            "`papa each --members 3 --asynchronous -- python train.py`"
        )
    files = PublishedFiles(os.environ[PUBLISHED])
    files.remove_unfinished(found[0])
    return files, *found


def _data_group() -> dist.ProcessGroup | None:
    """The processes that train the member of this process, if `papa each` started a launcher such as torchrun."""
    if dist.is_initialized():
        return dist.group.WORLD if dist.get_world_size() > 1 else None
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and num_ranks != "1":
        raise ConfigError(
            f"this process is one of {num_ranks} that train one member, and not connected with the others: call "
            "torch.distributed.init_process_group() before it joins the population"
        )
    return None


def connect_members(
    *,
    member: int,
    num_members: int,
    address: str,
    session: str = "0",
    exchange: str = "exact",
    data_group: dist.ProcessGroup | None = None,
    is_store_running: bool = False,
) -> DistributedGroup:
    """Connect this process, which trains one member, with those of the other members; all must call it.

    Args:
        member: the index of this process's member.
        num_members: the number of members.
        address: host and port of the store that processes connect to; that of member 0, which runs it.
        session: the same for all members, and new after a restart.
        exchange: how weights travel; see `papa.distributed.EXCHANGES`.
        data_group: the processes that train this member, where there are several: each is connected with those of the
            same rank that train other members.
        is_store_running: whether another process runs the store, as `papa each` does.
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
        group = open_group(PrefixStore(f"papa/{session}/{rank}", store), member, num_members, hostname=host)
        return DistributedGroup(group, exchange=exchange, data_group=data_group)
    except RuntimeError as error:
        raise LostError(
            f"member {member} cannot connect to the other members at {address}: are all {num_members} started, and can "
            "this machine reach that address?"
        ) from error


def open_group(store: Store, rank: int, num_ranks: int, *, hostname: str, name: str = "main") -> ProcessGroup:
    """A process group over a store that is not registered with `torch.distributed`; all its processes must call it.

    The store is shared by these processes alone, and may have several groups with different names. On one machine they
    use the loopback interface, whatever its name resolves to.
    """
    prefixed = PrefixStore(name, store)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = COLLECTIVE_TIMEOUT
    is_local = hostname in ("127.0.0.1", "localhost")
    options._devices = [
        ProcessGroupGloo.create_device(hostname=hostname) if is_local else ProcessGroupGloo.create_default_device()
    ]
    backend = ProcessGroupGloo(prefixed, rank, num_ranks, options)
    group = ProcessGroup(prefixed, rank, num_ranks)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    own_groups[group] = OwnGroup(lambda name: open_group(store, rank, num_ranks, hostname=hostname, name=name))
    return group
