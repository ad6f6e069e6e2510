"""The newest weights of each member, published by the member and read by the others whenever they like.

Nobody waits for anybody. The law: a reader gets the whole content of one publication, never a part of one or a mix of
two, however the writer is stopped or killed.

- `PublishedFiles`, on one machine: a file for each member, in memory. It is written under a hidden name and renamed
  when it is complete. A reader that has opened it keeps the content it opened, since no file is ever changed.
- `PublishedStore`, between machines: chunks in a TCP store, each with the number of its publication, and one more key,
  set last, with the newest number. A reader takes chunks of that number only. A thread sends and receives, so that
  training does not wait for the network.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from papa.distributed.members import member_of_environment
from papa.distributed.torchrun import rank_of_torchrun
from papa.errors import ConfigError, LostError
from papa.files.storage import file_errors

LOG = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""The most bytes in a value of a TCP store, which refuses more than 8 MiB."""

SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_TO_RECONNECT = 1.0
SECONDS_TO_END = 30.0
"""How long a process that ends waits until its last weights are sent."""
CONNECT_TIMEOUT = datetime.timedelta(minutes=10)
ANSWER_TIMEOUT = datetime.timedelta(seconds=30)
"""How long the thread waits for an answer of the store, before it connects again."""

PUBLISHED = "PAPA_PUBLISHED"
"""The environment variable that says where members publish: a directory, or `tcp://host:port` of a store."""
TCP = "tcp://"

NUM_KEPT = 2
"""Publications of a member in the store: a reader of the last but one can finish while the next is written."""
NUM_NAMED = 8
"""Publications share this number of keys for each chunk. Keys are emptied, never removed: who asks a store for a
missing key has to wait."""


class Published(Protocol):
    """The newest weights of each member."""

    def publish(self, member: int, parts: Iterable[bytes | memoryview]) -> int:
        """Make this content the newest of a member, and return its size in bytes."""

    def version(self, member: int) -> str | None:
        """Changes with each publication of a member; None before the first."""

    def read(self, member: int) -> bytes | None:
        """The content that a member published last; None before the first."""


class PublishedFiles:
    """The newest weights in one directory, best in memory: `0.safetensors`, `1.safetensors` and so on.

    The directory is made if it does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        with file_errors(self.directory, "write"):
            self.directory.mkdir(parents=True, exist_ok=True)

    def path(self, member: int) -> Path:
        """The file of a member."""
        return self.directory / f"{member}.safetensors"

    def publish(self, member: int, parts: Iterable[bytes | memoryview]) -> int:
        """Write a new file and rename it."""
        path = self.path(member)
        # A name of its own: the process that this one replaces may still be there, and write.
        partial = self.directory / f".{member}.{uuid.uuid4().hex}.partial"
        with file_errors(path, "write"):
            try:
                with partial.open("wb", buffering=0) as file:
                    size = sum(_write_all(file, part) for part in parts)
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        return size

    def version(self, member: int) -> str | None:
        """The identity of the file."""
        try:
            status = os.stat(self.path(member))
        except FileNotFoundError:
            return None
        return f"{status.st_ino} {status.st_mtime_ns}"

    def read(self, member: int) -> bytes | None:
        """The content of the file."""
        try:
            return self.path(member).read_bytes()
        except FileNotFoundError:
            return None

    def remove_unfinished(self, member: int) -> None:
        """Remove what a killed process of this member left half-written."""
        for partial in self.directory.glob(f".{member}.*.partial"):
            partial.unlink(missing_ok=True)


def published_of_environment() -> tuple[Published, int, int]:
    """Where the members that `papa each --asynchronous` or torchrun started publish; this member; their number."""
    where, found = os.environ.get(PUBLISHED), member_of_environment()
    if where and found is not None:
        if where.startswith(TCP):
            return PublishedStore(where.removeprefix(TCP), found[1]), *found
        files = PublishedFiles(where)
        files.remove_unfinished(found[0])
        return files, *found
    rank = rank_of_torchrun()
    if rank is None:
        raise ConfigError(
            "this process is not one of several asynchronous members: start it with "
            "`papa each --members 3 --asynchronous -- python train.py`, or with torchrun"
        )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    num_ranks = int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            f"the store at {address} ends with rank 0, and the newest weights with it: start the processes with "
            "torchrun, whose store outlives them"
        )
    return PublishedStore(address, num_ranks), rank, num_ranks


def _write_all(file: Any, part: bytes | memoryview) -> int:
    view = memoryview(part).cast("B")
    size = len(view)
    while view:
        view = view[file.write(view) :]
    return size


class PublishedStore:
    """The newest weights in a TCP store, given by its host and port. This process holds those of all members."""

    def __init__(self, address: str, num_members: int, *, prefix: str = "papa/published") -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"the address is '{address}', expected host and port, such as 127.0.0.1:29400")
        self._host, self._port, self._prefix = host, int(port), prefix
        self._num_members = num_members
        self._contents: dict[int, tuple[str, bytes]] = {}
        """Version and content of each member, as published here or received last."""
        self._own: set[int] = set()
        """The members that this process publishes."""
        self._unsent: set[int] = set()
        self._lock = threading.Lock()
        self._wake, self._is_closed = threading.Event(), False
        try:
            self._store = self._connect(CONNECT_TIMEOUT)
            self._receive()
        except RuntimeError as error:
            raise LostError(
                f"cannot connect to {address}: does the store run, and can this machine reach it?"
            ) from error
        # A daemon, because Python waits for other threads without a timeout.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def publish(self, member: int, parts: Iterable[bytes | memoryview]) -> int:
        """Copy the content; the thread sends it."""
        content = b"".join(parts)
        with self._lock:
            self._contents[member] = uuid.uuid4().hex, content
            self._own.add(member)
            self._unsent.add(member)
        self._wake.set()
        return len(content)

    def version(self, member: int) -> str | None:
        """That of the content that was received last."""
        found = self._contents.get(member)
        return None if found is None else found[0]

    def read(self, member: int) -> bytes | None:
        """The content that was received last."""
        found = self._contents.get(member)
        return None if found is None else found[1]

    def close(self) -> None:
        """Send what was published, for a while, and end the thread."""
        atexit.unregister(self.close)
        self._is_closed = True
        self._wake.set()
        self._thread.join(SECONDS_TO_END)

    def _connect(self, timeout: datetime.timedelta) -> Store:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, self._port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        store.set_timeout(ANSWER_TIMEOUT)
        return PrefixStore(self._prefix, store)

    def _run(self) -> None:
        deadline = float("inf")
        while not self._is_closed or (self._unsent and time.monotonic() < deadline):
            if self._is_closed:
                deadline = min(deadline, time.monotonic() + SECONDS_TO_END)
            try:
                self._send()
                if not self._is_closed:
                    self._receive()
                    self._wake.wait(SECONDS_BETWEEN_LOOKS)
                    self._wake.clear()
            except RuntimeError as error:
                LOG.warning(
                    "the store at %s:%s does not answer, members go on alone: %s", self._host, self._port, error
                )
                self._reconnect()

    def _reconnect(self) -> None:
        time.sleep(SECONDS_TO_RECONNECT)
        with contextlib.suppress(RuntimeError):
            self._store = self._connect(ANSWER_TIMEOUT)
            with self._lock:  # it may be a new and empty store
                self._unsent |= self._own

    def _send(self) -> None:
        while self._unsent:
            with self._lock:
                member = min(self._unsent)
                _, content = self._contents[member]
                self._unsent.discard(member)
            try:
                send_content(self._store, str(member), content)
            except RuntimeError:
                with self._lock:
                    self._unsent.add(member)
                raise

    def _receive(self) -> None:
        for member in range(self._num_members):
            found = None
            if member not in self._own:
                found = receive_content(self._store, str(member), unless=self.version(member))
            with self._lock:
                if found is not None and member not in self._own:
                    self._contents[member] = found


def send_content(store: Store, name: str, content: bytes) -> None:
    """Store a content in chunks that begin with a new number, then set the key that has the newest number."""
    number = store.add(f"{name}/count", 1)  # a number of its own for each publication of each process
    starts = range(0, max(1, len(content)), CHUNK_BYTES)
    for chunk, start in enumerate(starts):
        store.set(_key(name, number, chunk), _mark(number) + content[start : start + CHUNK_BYTES])  # type: ignore[arg-type]
    before = _newest(store, name)
    if before is None or before["number"] < number:
        store.set(f"{name}/newest", json.dumps({"number": number, "chunks": len(starts)}))
    # All since the last: a killed process may have left chunks under a number that no key names.
    first = max(1, number - NUM_NAMED + 1, (number if before is None else before["number"]) - NUM_KEPT)
    for old in range(first, number - NUM_KEPT + 1):
        for chunk in range(len(starts)):
            store.set(_key(name, old, chunk), "")


def receive_content(store: Store, name: str, *, unless: str | None = None) -> tuple[str, bytes] | None:
    """The version and the content that was stored last; None if there is none, or if it is the version `unless`."""
    for _ in range(NUM_KEPT):
        newest = _newest(store, name)
        if newest is None or str(newest["number"]) == unless:
            return None
        number = newest["number"]
        keys = [_key(name, number, chunk) for chunk in range(newest["chunks"])]
        chunks = store.multi_get(keys) if store.check(keys) else []
        mark = _mark(number)
        if len(chunks) == len(keys) and all(chunk.startswith(mark) for chunk in chunks):
            return str(number), b"".join(chunk[len(mark) :] for chunk in chunks)
    return None  # it changes faster than it can be read; the next call tries again


def _key(name: str, number: int, chunk: int) -> str:
    return f"{name}/{number % NUM_NAMED}/{chunk}"


def _mark(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _newest(store: Store, name: str) -> dict[str, int] | None:
    if not store.check([f"{name}/newest"]):
        return None
    found: dict[str, int] = json.loads(store.get(f"{name}/newest"))
    return found
