"""One member per thread, each with a group of its own, as the processes of `papa.member` have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from papa.distributed.members import connect_members


def run_threads(job: Callable[[int, Any], Any], size: int = 2) -> list[Any]:
    """What a job returns for each member; it is called with the member's index and group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    found: dict[int, Any] = {}

    def run(member: int) -> None:
        try:
            group = connect_members(member=member, num_members=size, address=address, is_store_running=True)
            found[member] = job(member, group)
        except BaseException as error:
            found[member] = error

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return [found[member] for member in range(size)]
