"""File locks: one process writes a directory, and others get an error that names it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from papa.errors import PapaError, RunError
from papa.storage import file_errors, json_text, parse_json, read_file, write_file


class Lock:
    """Held while a directory is written; a lock whose process died is taken over.

    The system releases a `filelock.FileLock` when its process ends. The JSON file next to it names the host and the
    process, for messages and for file systems whose locks other hosts do not see. Missing directories above it are
    made, and removed again if they stay empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path.with_name(f"{path.name}.flock"), timeout=0)
        self._made: list[Path] = []
        self._is_ours = False

    @property
    def seems_held(self) -> bool:
        """Whether a process seems to hold it; a process of another host counts as alive."""
        if not self.path.exists():
            return False
        host, pid = self._holder()
        return pid is None or host != socket.gethostname() or _is_alive(pid)

    def __enter__(self) -> Lock:
        directory = self.path.parent
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            with file_errors(directory, "make the directory"):
                directory.mkdir(parents=True, exist_ok=True)
            self._check_holder(self._acquire())
            with file_errors(directory, "lock"):
                self._is_ours = True
                write_file(self.path, [json_text({"host": socket.gethostname(), "pid": os.getpid()}).encode()])
            return self
        except Timeout as error:
            raise RunError(f"{self._in_use_by(*self._holder())}: wait until it ends, or stop it") from error
        except BaseException:  # also a signal, which must not leave an empty directory
            self._release()
            raise

    def _acquire(self) -> bool:
        """Take the lock; False if the file system has none, or cannot be written, which shows later."""
        try:
            self._lock.acquire()
        except Timeout:
            raise
        except OSError:
            return False
        return True

    def _check_holder(self, is_supported: bool) -> None:
        host, pid = self._holder()
        if host not in (None, socket.gethostname()):
            raise RunError(
                f"{self._in_use_by(host, pid)}; whether it is alive is not visible from here. If it is not, remove "
                f"{self.path}"
            )
        if not is_supported and pid is not None and _is_alive(pid):
            raise RunError(f"{self._in_use_by(host, pid)}: wait until it ends, or stop it")

    def _holder(self) -> tuple[str | None, int | None]:
        """The host and process in the file; None if they cannot be read."""
        try:
            value = parse_json(read_file(self.path, 4096))
            host, pid = value["host"], value["pid"]
        except (PapaError, ValueError, KeyError, TypeError):
            return None, None
        return (host, pid) if isinstance(host, str) and type(pid) is int and 0 < pid < 1 << 31 else (None, None)

    def _in_use_by(self, host: str | None, pid: int | None) -> str:
        holder = "another process" if pid is None else f"process {pid} on {host}"
        return f"{self.path.parent} is in use by {holder}"

    def _release(self) -> None:
        if self._is_ours:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self._is_ours or self._lock.is_locked:  # else it may be another's
            _release(self._lock)
        self._is_ours = False
        for path in self._made:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()

    def __exit__(self, *_: object) -> None:
        self._release()


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Wait for a lock file and hold it; without effect on file systems that have no locks."""
    lock = FileLock(path)
    with contextlib.suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        _release(lock)


def _release(lock: FileLock) -> None:
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)  # while it is held: a process that has it open notices that it is gone
    lock.release()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # it may be the process of another user
    return True
