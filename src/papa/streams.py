"""Random streams: every random number of papa is a function of (seed, purpose, member, position).

A stream never depends on what was drawn before it. The data order of member 2 in epoch 7 is the same whether the run
has 3 members or 10 and whether it was resumed, so checkpoints need to store no random state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive(seed: int, purpose: str, member: int | None = None, position: int = 0) -> int:
    """The 63-bit seed for one purpose, member (None for all members together) and position."""
    key = f"{seed}/{purpose}/{'all' if member is None else member}/{position}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, member: int | None = None, position: int = 0) -> torch.Generator:
    """A new CPU generator for one purpose, member and position.

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
    """Seed torch's *global* generators inside the block and restore them afterwards.

    For code that can only draw from the global generators: `nn.init`, dropout, drop-path.
    """
    own, before = derive(seed, purpose, member, position), torch.initial_seed()
    # A process that has not used CUDA may begin to inside the block, as `with torch.device("cuda")` does.
    may_begin = not torch.cuda.is_initialized() and torch.cuda.is_available()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=accelerators_in_use()):
        seed_global_(own)
        if may_begin:
            torch.cuda.manual_seed_all(own)  # until then, torch keeps the last seed
        try:
            yield
        finally:
            if may_begin:
                torch.cuda.manual_seed_all(before)


def seed_global_(seed: int) -> None:
    """Seed the global generators in use, cheaply enough to do so at every step.

    Without CUDA, each call of `torch.manual_seed` stores a traceback in a list that keeps growing; this does not.
    """
    torch.default_generator.manual_seed(seed)
    if accelerators_in_use():
        torch.cuda.manual_seed_all(seed)


def accelerators_in_use() -> list[int]:
    """The indices of all CUDA devices, or none while this process has not used CUDA."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
