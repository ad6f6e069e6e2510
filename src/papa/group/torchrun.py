"""Being one of the processes that `torchrun` started, on this machine and perhaps on others."""

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

from papa.errors import ConfigError, RunError
from papa.group.base import Group
from papa.group.distributed import DistributedGroup
from papa.group.plainly import plainly
from papa.group.shared_memory import SharedMemoryGroup
from papa.process import configure_process

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process it starts."""

PATIENCE_TO_MEET = datetime.timedelta(minutes=2)
"""How long processes wait for each other at the start."""

PATIENCE = datetime.timedelta(minutes=30)
"""How long a process waits for another that neither answers nor is gone; one that died is noticed at once."""


def rank_of_torchrun(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's number among those that torchrun started; None when it did not start this one.

    Raises a `ConfigError` that names what is missing when only a part of what torchrun tells is there.

    Example:
        >>> rank_of_torchrun({}) is None
        True
        >>> rank_of_torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
        1
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
    """The processes of one torchrun, connected.

    Args:
        exchange: how numbers travel; see `papa.group.EXCHANGES`.
    """

    def __init__(self, exchange: str = "exact") -> None:
        self.exchange = exchange
        _connect()
        with plainly("comparing notes"):
            pairs: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
            dist.all_gather_object(pairs, (_name_of(os.getppid()), _name_of(os.getpid())))
        self.names = {
            "agents": sorted({agent for agent, _ in pairs}),
            "processes": sorted(process for _, process in pairs),
        }
        """Who these processes are, and the agents of torchrun, which start them and outlive them; a JSON value."""

    def is_restart_of(self, names: Mapping[str, Any]) -> bool:
        """Whether this torchrun started the processes that had these `names`, and has started all anew since.

        It does so when one of them died, and when a machine came or went, which it does not count as a restart.
        """
        same = {key: set(self.names[key]) & set(names.get(key, ())) for key in self.names}
        return bool(same["agents"]) and not same["processes"]

    def group(self, size: int) -> Group:
        """What holds a population of `size`: one mapping where torchrun runs on one machine, else each its own rows."""
        on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        if on_one_machine and self.exchange == "exact":
            return SharedMemoryGroup(size)
        spread = DistributedGroup(exchange=self.exchange)
        spread.share(size)
        return spread


def _name_of(process: int) -> str:
    """A process's name that no other ever had: its host, its number, and where that can be known, when it began."""
    try:
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        began = ""
    return f"{socket.gethostname()} {process} {began}".strip()


def _connect() -> None:
    if dist.is_initialized():
        return
    configure_process()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with _at_the_meeting_point(address):
        store, rank, num_ranks = next(rendezvous("env://", timeout=PATIENCE_TO_MEET))
        store.set_timeout(PATIENCE_TO_MEET)
        store = PrefixStore(agree_on_session(store, rank, num_ranks), store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE)
    atexit.register(_disconnect)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def agree_on_session(store: Store, rank: int, num_ranks: int) -> str:
    """A name that the processes of this start share with no earlier one.

    torchrun's store outlives its processes, and what they left there would lead new ones to addresses where nobody is.
    So every process greets with a word of its own, and rank 0 answers each greeting it finds with the new name. Only a
    rank 0 that is alive answers a new word.
    """
    if rank == 0:
        session = uuid.uuid4().hex
        waiting, deadline = set(range(1, num_ranks)), time.monotonic() + PATIENCE_TO_MEET.total_seconds()
        while waiting:
            for other in waiting:
                if store.check([f"greeting/{other}"]):
                    store.set(f"answer/{store.get(f'greeting/{other}').decode()}", session)
            waiting = {other for other in waiting if not store.check([f"{session}/here/{other}"])}
            if waiting and time.monotonic() > deadline:
                raise RuntimeError(f"rank {min(waiting)} did not come within {PATIENCE_TO_MEET}")
            time.sleep(0.02)
        return session
    word = uuid.uuid4().hex
    store.set(f"greeting/{rank}", word)
    session = str(store.get(f"answer/{word}").decode())
    store.set(f"{session}/here/{rank}", "")
    return session


@contextlib.contextmanager
def _at_the_meeting_point(address: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, dist.DistError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise RunError(
                f"port {address.rpartition(':')[2]} is in use: choose another with torchrun --master-port (or "
                f"MASTER_PORT) ({reason})"
            ) from error
        raise RunError(
            f"cannot meet the other processes at {address}: are all of them started, and can this machine reach that "
            f"address? ({reason})"
        ) from error
