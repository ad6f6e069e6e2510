"""Files that are whole or not there at all, and reading files that somebody may have tampered with.

Everything papa writes goes through `write_file`: flushed to disk before it gets its name. Everything it reads is
refused with a `RunError` unless it is a regular file of a sensible size.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from papa.errors import RunError

CHUNK_BYTES = 1 << 22
MOST_JSON_BYTES = 1 << 26
"""Larger JSON than any papa writes."""


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file and flush it to disk; its size and its SHA-256. May raise any `OSError`."""
    size, sha = 0, hashlib.sha256()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        with ThreadPoolExecutor(1) as beside:  # both let go of the interpreter, and take about as long as each other
            for part in parts:
                view = memoryview(part).cast("B")
                size += len(view)
                digested = beside.submit(sha.update, view)
                _write_all(handle, view)
                digested.result()
        os.fsync(handle)
    finally:
        os.close(handle)
    return size, sha.hexdigest()


def _write_all(handle: int, view: memoryview) -> None:
    while view:
        view = view[os.write(handle, view[:CHUNK_BYTES]) :]


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """As `write_file`, but under another name first: a reader sees the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        facts = write_file(partial, parts)
        os.replace(partial, path)
        flush_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return facts


def flush_directory(path: Path) -> None:
    """Make sure that the names in a directory are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file's content at once, or raise a `RunError` and leave it as it was."""
    try:
        replace_file(path, [content.encode() if isinstance(content, str) else content])
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON; numbers that are not finite, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as readable JSON, atomically."""
    write_atomically(path, json_text(value, indent=2) + "\n")


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; `ValueError` for what is no JSON, says a key twice, or holds no finite number."""
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_without_repeats,
            parse_constant=_finite_number,
            parse_float=_finite_number,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("it has a key twice")
    return value


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """A handle to read a regular file, and its size; anything else (a pipe would never end) is a `RunError`."""
    handle = -1
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise RunError(f"cannot read {path}: it is not a regular file")
        yield handle, facts.st_size
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    finally:
        if handle >= 0:
            os.close(handle)


def read_into(handle: int, view: memoryview) -> bool:
    """Fill a view from a file; whether there was enough."""
    while view:
        num_read = os.readv(handle, [view[:CHUNK_BYTES]])
        if not num_read:
            return False
        view = view[num_read:]
    return True


def read_file(path: Path, most: int = MOST_JSON_BYTES) -> bytes:
    """The content of a file of at most so many bytes."""
    with opened(path) as (handle, size):
        if size > most:
            raise RunError(f"{path} has {size:,} bytes, expected at most {most:,}: it is not one of papa's")
        content = bytearray(size)
        if not read_into(handle, memoryview(content)):
            raise RunError(f"{path} became shorter while it was read")
        return bytes(content)


def read_json(path: Path) -> Any:
    """Read a JSON file, or raise a `RunError` that names it."""
    content = read_file(path)
    try:
        return parse_json(content)
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunError(f"{path} holds a {type(value).__name__}, expected an object")
    return value
