"""The random state of a process, which checkpoints of Lightning lack, as values that can be loaded safely."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from papa.streams import accelerators_in_use


def random_state() -> dict[str, Any]:
    """The state of the global generators of torch, Python and NumPy: tensors, numbers and strings."""
    state: Any = np.random.get_state()
    name, words, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in accelerators_in_use()],
        "python": random.getstate(),
        "numpy": (name, words.tolist(), *rest),
    }


def set_random_state_(state: dict[str, Any]) -> None:
    """Continue from a `random_state`; devices that were not there then are left as they are."""
    torch.set_rng_state(state["torch"].cpu())
    for device, own in zip(accelerators_in_use(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(own.cpu(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
