"""How a process of papa's own uses the machine; results do not depend on it, but for the number of threads."""

from __future__ import annotations

import ctypes

import torch

from papa.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The numbers by which glibc's `mallopt` knows what is set."""
_LARGEST_KEPT = 2**25
"""Tensors up to 32 MB, the most that glibc allows, come from memory that the process keeps."""
_MOST_KEPT = 2**30
"""So much free memory is kept at most at the end of the heap; the rest goes back to the system."""


def configure_process() -> None:
    """One thread, and memory that stays with the process; for processes that belong to papa, never a user's own.

    More threads change the bits of a result, and stall each other on a busy machine.
    """
    torch.set_num_threads(1)
    keep_memory()


def find_device(name: str | torch.device, *, option: str = "device") -> torch.device:
    """The device of that name; `auto` is an accelerator where there is one.

    Args:
        name: as torch has it, or `auto`.
        option: what the user calls it, for messages.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{option} is {name}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def keep_memory() -> bool:
    """Keep freed memory for the next tensor, and tell whether the system's allocator can be told so.

    glibc hands memory of the size of activations back to the system as soon as it is free, and every step of training
    would begin by asking for it again, page by page and cleared.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # only glibc has it
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_KEPT, _M_TRIM_THRESHOLD: _MOST_KEPT}
    answers = [mallopt(what, value) for what, value in settings.items()]
    return answers == [1, 1]
