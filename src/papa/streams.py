"""Every random stream of papa, derived from (seed, purpose, member, position).

A stream is a function of *where* it is used, never of what was drawn before it: the order of member 2 in epoch 7 is
the same whether the run has 3 members or 10, was resumed at epoch 6, or drew anything else in between. So the
position of a run is one integer, and nothing about randomness needs saving.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive(seed: int, purpose: str, member: int | None = None, position: int = 0) -> int:
    """The 63-bit seed that belongs to one purpose of one member (or of all) at one position.

    Example:
        >>> derive(1, "order", member=0) == derive(1, "order", member=1)
        False
    """
    key = f"{seed}/{purpose}/{'all' if member is None else member}/{position}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, member: int | None = None, position: int = 0) -> torch.Generator:
    """A fresh CPU generator for one purpose of one member (or of all) at one position.

    Example:
        >>> order = torch.randperm(8, generator=stream(1, "order", member=0, position=3))

    Args:
        seed: the run's seed.
        purpose: what is drawn, such as `init`, `order`, `augment`, `split`, `merge`.
        member: the member it belongs to; None for what all members share.
        position: an epoch or a step.
    """
    return torch.Generator("cpu").manual_seed(derive(seed, purpose, member, position))


@contextlib.contextmanager
def global_stream(seed: int, purpose: str, member: int | None = None, position: int = 0) -> Iterator[None]:
    """Seed torch's *global* generators for the block, then put them back as they were found.

    For code that draws from the global generator and offers no other: `nn.init`, dropout, drop-path.
    """
    with torch.random.fork_rng(devices=accelerators_in_use()):
        seed_global_(derive(seed, purpose, member, position))
        yield


def seed_global_(seed: int) -> None:
    """Seed the global generators in use.

    Unlike `torch.manual_seed`, which on a machine without CUDA notes a traceback for every call in a list that grows,
    this is cheap enough for every step.
    """
    torch.default_generator.manual_seed(seed)
    if accelerators_in_use():
        torch.cuda.manual_seed_all(seed)


def accelerators_in_use() -> list[int]:
    """The CUDA devices whose generators may have been drawn from; none where CUDA was not used."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
