"""Saying plainly what a broken connection means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from papa.errors import LostError


@contextlib.contextmanager
def plainly(doing: str) -> Iterator[None]:
    """Turn what a backend raises when a connection breaks into a `LostError` that says what it means."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise LostError(
            f"{rank} lost the other processes while {doing}: one of them failed, was killed or cannot be reached; "
            f"look at what the others wrote ({reason})"
        ) from error
