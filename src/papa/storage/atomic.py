"""Reading and writing whole files: a file that papa writes is complete or not there at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from papa.errors import PapaError, RunError
from papa.storage.errors import file_errors

CHUNK_BYTES = 1 << 22
MAX_JSON_BYTES = 1 << 26
"""More than any JSON file of papa has."""


def write_file(path: Path, parts: Iterable[bytes | memoryview], digest: Any = None) -> int:
    """Write a file and flush it to disk.

    Args:
        path: the file; replaced if it exists.
        parts: its content. A part may reuse the memory of the part before.
        digest: a `hashlib` object to update with the content.

    Returns:
        The number of bytes.

    Raises:
        OSError: as the system reports it.
    """
    size = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        with ThreadPoolExecutor(1) as hasher:  # hashing and writing take about as long, and both release the GIL
            for part in parts:
                view = memoryview(part).cast("B")
                size += len(view)
                hashed = None if digest is None else hasher.submit(digest.update, view)
                while view:
                    view = view[os.write(handle, view[:CHUNK_BYTES]) :]
                if hashed is not None:
                    hashed.result()
        os.fsync(handle)
    finally:
        os.close(handle)
    return size


def partial_path(path: Path) -> Path:
    """The hidden name of a file while it is written."""
    return path.with_name(f".{path.name}.partial")


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """As `write_file`, but atomic: a reader sees the old content or the new content, never a part of it."""
    partial = partial_path(path)
    try:
        write_file(partial, parts)
        os.replace(partial, path)
        flush_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file's content at once, or raise a `RunError` and leave it unchanged."""
    with file_errors(path, "write"):
        replace_file(path, [content.encode() if isinstance(content, str) else content])


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES, *, error: type[PapaError] = RunError) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    with (
        file_errors(path, error=error),
        open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file,  # else opening a pipe would wait for a writer
    ):
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise error(f"cannot read {path}: it is not a regular file")
        if status.st_size > max_bytes:
            raise error(f"{path} has {status.st_size:,} bytes, expected at most {max_bytes:,}: papa did not write it")
        return file.read(max_bytes)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` prints it. Raises an `OSError` as the system reports it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
