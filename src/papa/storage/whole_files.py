"""Whole files: written completely or not at all, read strictly; errors about them become errors of papa."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from papa.errors import PapaError, RunError

CHUNK_BYTES = 1 << 22
MAX_JSON_BYTES = 1 << 26
"""More than any JSON file of papa has."""
CONTROL = re.compile(r"[\x7f-\x9f]|(?<!\\)(?:\\\\)*\\(?:[bfr]|u00(?:0[0-8bcdef]|1.|7f|[89].))", re.IGNORECASE)
"""Control characters in a JSON text, plain or escaped, except for line breaks and tabs."""
CONTENT_ERRORS = (SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError)
"""What readers raise for content that is not what they expect."""


class DamagedError(RunError):
    """A file that is not what papa wrote: truncated, altered or missing."""


@contextlib.contextmanager
def file_errors(
    path: Path, action: str = "read", *, error: type[PapaError] = RunError, kind: str | None = None
) -> Iterator[None]:
    """Raise errors about a file as errors of papa that name it.

    `kind` is what the file must be, such as "valid JSON"; without it only errors of the system are translated.
    """
    try:
        yield
    except PapaError:
        raise
    except OSError as cause:
        raise error(f"cannot {action} {path}: {cause.strerror or cause}") from cause
    except CONTENT_ERRORS as cause:
        if kind is None:
            raise
        reason = (str(cause).splitlines() or [type(cause).__name__])[0].split(". ")[0][:200]
        raise error(f"{path} is not {kind}: {reason}; it may be truncated or altered") from cause


def write_file(path: Path, parts: Iterable[bytes | memoryview], digest: Any = None) -> int:
    """Write a file, flush it to disk and return its size; raises an `OSError` as the system reports it.

    A part may reuse the memory of the part before. `digest` is a `hashlib` object to update with the content.
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


def write_atomically(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Replace a file's content at once, or raise a `RunError` and leave it unchanged.

    A reader sees the old content or the new content, never a part of it.
    """
    partial = partial_path(path)
    content = content.encode() if isinstance(content, str) else content
    try:
        with file_errors(path, "write"):
            write_file(partial, [content] if isinstance(content, bytes) else content)
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


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON. Numbers that are not finite become null, since JSON has none."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, json_text(value, indent=2) + "\n")


def parse_json(data: bytes, *, allow_control: bool = False) -> Any:
    """Parse JSON; a `ValueError` for invalid JSON, repeated keys, numbers that are not finite, control characters."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("it has a key twice")
        return value

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is not a finite number")
        return value

    text = data.decode()
    if not allow_control and CONTROL.search(text):
        raise ValueError("it has control characters, which could change what a terminal shows")
    try:
        return json.loads(text, object_pairs_hook=without_repeats, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, *, error: type[PapaError] = RunError) -> Any:
    """Read a JSON file, or raise an error that names it."""
    content = read_file(path, error=error)
    with file_errors(path, error=error, kind="valid JSON"):
        return parse_json(content)


def read_object(path: Path, *, error: type[PapaError] = RunError) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    value = read_json(path, error=error)
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, expected an object")
    return value
