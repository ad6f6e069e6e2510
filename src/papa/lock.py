"""A lock on a directory: one process writes, and everybody else learns which."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from papa.errors import RunError

try:
    import fcntl
except ImportError:  # not a POSIX system: the process number in the file has to do
    fcntl = None  # type: ignore[assignment]


class Lock:
    """Held while a run is written; a lock whose process died is taken over.

    The system's own lock on the file vanishes with its process, however that ends. The host and process number in the
    file are for people, for file systems without locks, and for other hosts, which may not see the system's lock.

    Args:
        path: the lock file; directories above it are made, and removed again when nothing was put into them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = -1
        self._made: list[Path] = []

    @property
    def seems_held(self) -> bool:
        """Whether a process seems to hold it, without taking it; what processes of other hosts do cannot be seen."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            host, pid = _holder(handle)
        finally:
            os.close(handle)
        return pid is None or host != socket.gethostname() or _is_alive(pid)

    def __enter__(self) -> Lock:
        directory = self.path.parent
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the directory {directory}: {error.strerror or error}") from error
        try:
            self._acquire()
        except OSError as error:
            raise RunError(f"cannot lock {directory}: {error.strerror or error}") from error
        return self

    def _acquire(self) -> None:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                self._take(handle)
                if _is_still_there(handle, self.path):  # its holder may have removed it between our two calls
                    self._handle = handle
                    return
            finally:
                if self._handle != handle:
                    os.close(handle)

    def _take(self, handle: int) -> None:
        has_flock = fcntl is not None
        try:
            if has_flock:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunError(f"{self._in_use_by(*_holder(handle))}: wait until it ends, or stop it") from None
            has_flock = False
        host, pid = _holder(handle)
        if host not in (None, socket.gethostname()):
            raise RunError(
                f"{self._in_use_by(host, pid)}; whether it is alive cannot be seen from here. If it is not, remove "
                f"{self.path}"
            )
        if not has_flock and pid is not None and _is_alive(pid):
            raise RunError(f"{self._in_use_by(host, pid)}: wait until it ends, or stop it")
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)

    def _in_use_by(self, host: str | None, pid: int | None) -> str:
        who = "another process" if pid is None else f"process {pid} on {host}"
        return f"{self.path.parent} is in use by {who}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            if _is_still_there(self._handle, self.path):
                self.path.unlink()
        with contextlib.suppress(OSError):
            os.close(self._handle)
        for path in self._made:
            with contextlib.suppress(OSError):  # it holds a run now
                path.rmdir()


def _is_still_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> tuple[str | None, int | None]:
    """Host and process number in a lock file; None where they cannot be read."""
    try:
        value = json.loads(os.pread(handle, 4096, 0))
        host, pid = value["host"], value["pid"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, None
    return (host, pid) if isinstance(host, str) and type(pid) is int and 0 < pid < 1 << 31 else (None, None)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
