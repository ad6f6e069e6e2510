"""Threads, memory and devices of a process."""

from __future__ import annotations

import ctypes

import torch

from papa.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`."""
_LARGEST_KEPT = 2**25
"""Tensors of up to 32 MB, the most that glibc allows, are taken from memory that the process keeps."""
_MOST_KEPT = 2**30
"""Free memory at the end of the heap beyond this size goes back to the system."""


def configure_process() -> None:
    """Use one thread and keep freed memory; for processes that papa starts or commands it runs, never for a user's.

    More threads change the bits of a result, and slow each other down on a busy machine.
    """
    torch.set_num_threads(1)
    keep_memory()


def find_device(name: str | torch.device, *, option: str = "device") -> torch.device:
    """The device of that name, which errors call `option`; `auto` is CUDA where it is available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{option} is {name}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def keep_memory() -> bool:
    """Keep freed memory for the next tensors, and return whether the system's allocator supports this.

    glibc returns memory of the size of activations to the system as soon as it is free, so every training step would
    request it again, page by page and zeroed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # only glibc has it
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_KEPT, _M_TRIM_THRESHOLD: _MOST_KEPT}
    return [mallopt(option, value) for option, value in settings.items()] == [1, 1]
