"""Starting worker processes on this machine, and ending them together."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from papa.errors import LostError, PapaError, RunError
from papa.group.shared_memory import SharedMemoryGroup
from papa.process import configure_process

PATIENCE = datetime.timedelta(days=7)
"""How long a worker waits for the others: one may have an epoch more to train. Deaths are noticed by the parent."""

FOR_THE_PARENT = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
"""Signals that a terminal or a scheduler sends to all processes, and that the parent passes on in its own way."""

SECONDS_FOR_THE_CAUSE = 10.0
"""How long the parent waits for the reason why a worker lost the others: they may still be about to tell."""


def start_workers(job: Callable[..., Any], num_workers: int, size: int, *arguments: Any) -> Any:
    """Run `job(group, *arguments)` in that many processes of one thread each, and return what rank 0's returned.

    When one fails, the others are ended and its error is raised here.

    Args:
        job: a function at the top level of a module, so that a new process can import it.
        num_workers: how many processes.
        size: the number of members of the population they hold together.
        arguments: given to every one.
    """
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # which the first worker would start, letting signals through again
    with tempfile.TemporaryDirectory(prefix="papa-") as directory:
        workers = []
        for rank in range(num_workers):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(there, directory, rank, num_workers, size, job, arguments), daemon=True
            )
            with _signals_held_back():
                process.start()
            there.close()
            workers.append((process, here))
        try:
            answers = _answers(workers)
        finally:
            for process, _ in workers:
                process.kill()
            for process, _ in workers:
                process.join()
    return next(value for rank, value in answers if rank == 0)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Workers inherit that interrupts and requests to end do not reach them: those are for the parent to pass on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answers(workers: list[Any]) -> list[tuple[int, Any]]:
    """What every worker returned; the error of one that failed, rather than of one that lost it for that."""
    waiting = [connection for _, connection in workers]
    answers, lost = [], None
    while waiting:
        ready = multiprocessing.connection.wait(waiting, None if lost is None else SECONDS_FOR_THE_CAUSE)
        for connection in [connection for connection in waiting if connection in ready]:
            waiting.remove(connection)
            try:
                answers.append(_answer(connection))
            except LostError as error:
                lost = error
        if lost is not None and not ready:
            break
    if lost is not None:
        raise lost
    return answers


def _answer(connection: Connection) -> tuple[int, Any]:
    try:
        kind, rank, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise RunError("a worker process died without a word: was it killed, or out of memory?") from None
    if kind == "error":
        raise value
    return rank, value


def _send(connection: Connection, kind: str, rank: int, value: Any) -> None:
    # By value: torch's own way to send tensors between processes needs the sender to stay alive.
    connection.send_bytes(pickle.dumps((kind, rank, value)))


def _end_with_parent() -> None:
    """Leave at once when the process that started us is gone, so that nobody trains on for no one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _work(
    connection: Connection,
    directory: str,
    rank: int,
    num_workers: int,
    size: int,
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_PARENT)  # as inherited, but for a tracker started meanwhile
    configure_process()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Workers of one machine talk over loopback, whatever the machine's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=num_workers, timeout=PATIENCE
        )
        value = job(SharedMemoryGroup(size), *arguments)
        dist.barrier()
        _send(connection, "value", rank, value)
    except PapaError as error:
        _send(connection, "error", rank, error)
    except BaseException:
        _send(connection, "error", rank, RunError(f"worker {rank} failed:\n{traceback.format_exc()}"))
    finally:
        connection.close()
        if dist.is_initialized():
            dist.destroy_process_group()
