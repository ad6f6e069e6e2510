"""A thread for communication during training, and a bounded wait for it when the process ends."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from papa.distributed.collectives import disconnect

T = TypeVar("T")

SHUTDOWN_TIMEOUT = 30.0
"""Seconds that a process waits at its end for communication under way, in which other processes take part."""


class BackgroundThread:
    """One thread that runs functions in the order they are submitted.

    A script may end while a push is under way. Python would then destroy the connections that the thread uses, which
    aborts the process. So the end of the process waits for the thread, then closes the connections. After a timeout,
    because another process does not take part, it prints a message and exits.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A daemon, because Python waits for other threads without a timeout.
        self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()
        atexit.register(self._shut_down)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the thread, after those submitted before."""
        future: Future[T] = Future()
        self._tasks.put((future, function))
        return future

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        for task in iter(self._tasks.get, None):
            future, function = task
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del task, future, function  # the result is large, and the next task may come late

    def _shut_down(self) -> None:
        self._tasks.put(None)
        self._thread.join(SHUTDOWN_TIMEOUT)  # not only for the results: the thread still closes connections after them
        if not self._thread.is_alive():
            disconnect()
            return
        sys.stderr.write(
            f"papa: the mean for a delayed push did not arrive within {SHUTDOWN_TIMEOUT:g} seconds after the end of "
            "this process: did another process fail, or take fewer steps?\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
