"""A thread for what travels while training goes on, and a bounded wait for it when the process ends."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Task: TypeAlias = tuple[Future[Any], Callable[[], Any]]

SECONDS_AT_THE_END = 30.0
"""How long a process that ends waits for what is still travelling: others need it to take part, if they are there."""


class Background:
    """One thread that does what it is handed, in this order.

    A script may end with a push under way. Python would tear down the connections that the thread is using, which
    aborts the process. So at the end the thread is waited for, as the threads of all other processes are, and the
    connections are closed; where that takes too long, because another one never came, the process says so and leaves at
    once.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        arguments = (self._tasks, torch.get_num_threads())
        # A daemon: Python would wait for any other thread without end.
        self._thread = threading.Thread(target=_work, args=arguments, name="papa-mean", daemon=True)
        self._thread.start()
        atexit.register(self.finish)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let the thread do some work, after what it was handed before."""
        future: Future[T] = Future()
        self._tasks.put((future, work))
        return future

    def finish(self) -> None:
        """End the thread after what it was handed, and all connections; leave the process where that takes too long."""
        self._tasks.put(None)
        # For the thread itself, not for its results: it may still be letting go of connections.
        self._thread.join(SECONDS_AT_THE_END)
        if not self._thread.is_alive():
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        sys.stderr.write(
            f"papa: the mean of a push was still under way {SECONDS_AT_THE_END:g} seconds after this process was done, "
            "and is given up: did another process fail, or take fewer steps?\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _work(tasks: queue.SimpleQueue[Task | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for task in iter(tasks.get, None):
        _do(*task)
        del task


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
