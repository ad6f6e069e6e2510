"""Starts worker processes on this machine, and ends them together."""

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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from papa.distributed.collectives import disconnect
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.errors import LostError, PapaError, RunError
from papa.process import configure_process

COLLECTIVE_TIMEOUT = datetime.timedelta(days=7)
"""How long a worker waits for the others, which may train much longer. The parent notices a worker that died."""

PARENT_SIGNALS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
"""Signals that a terminal or a scheduler sends to all processes; only the parent handles them."""

CAUSE_TIMEOUT = 10.0
"""Seconds that the parent waits, after a worker lost the connection, for another worker's error that caused it."""


def start_workers(job: Callable[..., Any], num_workers: int, size: int, *arguments: Any) -> Any:
    """Run `job(group, *arguments)` in worker processes of one thread each, and return the value of rank 0.

    The job is a function at the top level of a module, so that a new process can import it. The workers hold a
    population of `size` members. When one of them fails, the others are ended and its error is raised.
    """
    context = worker_context()
    with _block_signals():
        resource_tracker.ensure_running()  # else the first worker would start it, which unblocks the signals again
    with tempfile.TemporaryDirectory(prefix="papa-", ignore_cleanup_errors=True) as directory:
        processes, connections = [], []
        try:
            for rank in range(num_workers):
                receiver, sender = context.Pipe(duplex=False)
                arguments_of_rank = (sender, f"file://{directory}/rendezvous", rank, num_workers, size, job, arguments)
                process = context.Process(target=_run_worker, args=arguments_of_rank, daemon=True)
                with _block_signals():
                    process.start()
                sender.close()
                processes.append(process)
                connections.append(receiver)
        except OSError as error:
            _end(processes)
            reason = f"{error.strerror or error}; free what is short, or use one worker"
            raise RunError(f"cannot start worker {len(processes)} of {num_workers}: {reason}") from error
        try:
            return _receive_all(connections)[connections[0]]
        finally:
            _end(processes)


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def worker_context() -> Any:
    """How workers start: as new processes, since one that has used autograd or an accelerator cannot be forked."""
    return multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Let the processes started in this block inherit that signals for the parent do not reach them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive_all(connections: list[Connection]) -> dict[Connection, Any]:
    """The value of each worker; raises a worker's own error rather than the `LostError` of one that lost it."""
    values: dict[Connection, Any] = {}
    lost: LostError | None = None
    waiting = list(connections)
    while waiting:
        ready = multiprocessing.connection.wait(waiting, None if lost is None else CAUSE_TIMEOUT)
        for connection in [connection for connection in waiting if connection in ready]:
            waiting.remove(connection)
            try:
                values[connection] = _receive(connection)
            except LostError as error:
                lost = error
        if not ready:
            break
    if lost is not None:
        raise lost
    return values


def _receive(connection: Connection) -> Any:
    try:
        error, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise RunError("a worker process died without a message: was it killed, or out of memory?") from None
    if error is not None:
        raise error
    return value


def _run_worker(
    connection: Connection,
    init_method: str,
    rank: int,
    num_workers: int,
    size: int,
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)  # inherited, unless a resource tracker was started since
    configure_process()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Workers of one machine use the loopback interface, whatever the name of the machine resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=num_workers, timeout=COLLECTIVE_TIMEOUT
        )
        value = job(SharedMemoryGroup(size), *arguments)
        dist.barrier()
        # Pickled here: torch would send tensors by shared memory, for which the sender must stay alive.
        message = pickle.dumps((None, value))
    except PapaError as error:
        message = pickle.dumps((error, None))
    except BaseException:
        message = pickle.dumps((RunError(f"worker {rank} failed:\n{traceback.format_exc()}"), None))
    connection.send_bytes(message)
    connection.close()
    disconnect()


def _exit_with_parent() -> None:
    """Exit when the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
