"""File locks: one process writes a directory, and others get an error that names it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from papa.errors import RunError
from papa.storage.whole_files import file_errors

SECONDS = 0.2
"""How long to try: another process may just look whether the lock is held."""


class Lock:
    """Held while a directory is written; the system releases it when its process ends.

    Missing directories above it are made, and removed again if they stay empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path, timeout=SECONDS)
        self._made: list[Path] = []

    @property
    def is_held(self) -> bool:
        """Whether another process holds it, or another lock of this one."""
        if not self.path.exists():
            return False
        try:
            with FileLock(self.path, timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # the directory cannot be written
            return False

    def __enter__(self) -> Lock:
        directory = self.path.parent
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            with file_errors(directory, "make the directory"):
                directory.mkdir(parents=True, exist_ok=True)
            with file_errors(directory, "lock"):
                self._acquire()
            return self
        except BaseException:  # also a signal, which must not leave an empty directory
            self.__exit__()
            raise

    def _acquire(self) -> None:  # of its own: within __enter__, a signal between two blocks would not be caught there
        try:
            self._lock.acquire()
        except Timeout:
            raise RunError(f"{self.path.parent} is in use by another process: wait until it ends, or stop it") from None

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:  # else it may be another's
            _release(self._lock)
        for path in self._made:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


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
