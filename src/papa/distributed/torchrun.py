"""Connects the processes that torchrun started, on one or more machines."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from papa.core.group import Group
from papa.distributed.collectives import all_gather_object, disconnect, has_nccl
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.errors import ConfigError, RunError
from papa.process import configure_process

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torchrun sets."""

RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=2)
"""How long processes wait for each other at the start."""

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for one that does not answer; a process that died is noticed at once."""


def rank_of_torchrun(environment: Mapping[str, str] = os.environ) -> int | None:
    """The rank that torchrun gave to this process; None when torchrun did not start it.

    Example:
        >>> rank_of_torchrun({}) is None
        True
        >>> rank_of_torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
        1

    Raises:
        ConfigError: some variables of torchrun are missing or invalid.
    """
    if not environment.keys() & {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"}:
        return None
    missing = [name for name in VARIABLES if name not in environment]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set, though this looks like a process of torchrun: start it with torchrun, set all "
            f"of {', '.join(VARIABLES)}, or unset RANK and WORLD_SIZE"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise ConfigError(f"{name} is '{environment[name]}', expected a whole number")
    rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if rank >= num_ranks:
        raise ConfigError(f"RANK is {rank}, expected less than WORLD_SIZE ({num_ranks}): ranks are counted from 0")
    return rank


class Torchrun:
    """The connected processes of one torchrun."""

    def __init__(self) -> None:
        _connect()
        pairs = all_gather_object((_process_name(os.getppid()), _process_name(os.getpid())))
        self.names = {
            "agents": sorted({agent for agent, _ in pairs}),
            "processes": sorted(process for _, process in pairs),
        }
        """Names of these processes, and of torchrun's agents, which start them and outlive them; a JSON value."""

    def is_restart_of(self, names: Mapping[str, Any]) -> bool:
        """Whether the processes with these `names` were started by the same torchrun, and all restarted since.

        torchrun restarts all processes when one died, and, without counting it as a restart, when a machine joins.
        """
        same = {key: set(self.names[key]) & set(names.get(key, ())) for key in self.names}
        return bool(same["agents"]) and not same["processes"]

    def group(self, size: int, device: str = "cpu") -> Group:
        """The group for a population of `size` on a device.

        Members on the CPUs of one machine share memory. Those on GPUs are averaged there.
        """
        is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        is_on_gpus = has_nccl() and not device.startswith("cpu")
        if is_one_machine and not is_on_gpus:
            return SharedMemoryGroup(size)
        group = DistributedGroup()
        group.local_range(size)  # raises where there are more ranks than members
        return group


def _process_name(process: int) -> str:
    """A unique name: host, process id and, on Linux, the start time, since ids are reused."""
    try:
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return f"{socket.gethostname()} {process} {started}".strip()


def _connect() -> None:
    if dist.is_initialized():
        return
    configure_process()
    backend, local_rank = "gloo", int(os.environ.get("LOCAL_RANK", "0"))
    if has_nccl() and local_rank < torch.cuda.device_count():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(local_rank)
    with rendezvous_errors(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]):
        store, rank, num_ranks = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        store = PrefixStore(agree_on_session(store, rank, num_ranks), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)
    atexit.register(disconnect)


def agree_on_session(
    store: Store, rank: int, num_ranks: int, *, timeout: datetime.timedelta = RENDEZVOUS_TIMEOUT
) -> str:
    """A key prefix that the processes of this start share with no earlier start.

    torchrun's store outlives its processes, and would send new processes to the addresses of old ones. So every
    process stores a random token, and rank 0 answers each token with the prefix. No rank 0 of an earlier start can
    answer a new token.
    """
    if rank == 0:
        session = uuid.uuid4().hex
        waiting, deadline = set(range(1, num_ranks)), time.monotonic() + timeout.total_seconds()
        while waiting:
            for other in waiting:
                if store.check([f"token/{other}"]):
                    store.set(f"answer/{store.get(f'token/{other}').decode()}", session)
            waiting = {other for other in waiting if not store.check([f"{session}/ready/{other}"])}
            if waiting and time.monotonic() > deadline:
                raise RunError(
                    f"rank {min(waiting)} did not connect within {timeout.total_seconds():g} seconds: are "
                    "all processes started, and can their machines reach this one?"
                )
            time.sleep(0.02)
        return session
    token = uuid.uuid4().hex
    store.set(f"token/{rank}", token)
    session = str(store.get(f"answer/{token}").decode())
    store.set(f"{session}/ready/{rank}", "")
    return session


@contextlib.contextmanager
def rendezvous_errors(address: str, port: str) -> Iterator[None]:
    """Raise a `RunError` where processes cannot connect."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        message = (
            f"cannot connect to the other processes at {address}:{port}: are all of them started, and can this machine "
            "reach that address?"
        )
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            message = f"port {port} is in use: choose another with torchrun --master-port, or MASTER_PORT"
        raise RunError(message) from error
