"""The one place where errors of the system, JSON and safetensors become errors of papa."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from papa.errors import PapaError, RunError

CONTENT_ERRORS = (SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError)
"""What readers raise for content that is not what they expect."""


class DamagedError(RunError):
    """A file that is not what papa wrote: truncated, altered or missing."""


@contextlib.contextmanager
def file_errors(
    path: Path, action: str = "read", *, error: type[PapaError] = RunError, kind: str | None = None
) -> Iterator[None]:
    """Raise errors about a file as errors of papa that name it.

    Args:
        path: the file.
        action: what is done with it, for the message.
        error: the class to raise.
        kind: what the file must be, such as "valid JSON"; without it only errors of the system are translated.
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
