"""Memory for intermediate results that is used again, instead of new memory for each."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

MAX_VIEWS = 64


class _Scratch(threading.local):
    """Memory for one block of columns, and for one row of a block, that is used again for every block.

    New memory for each block would have to be mapped by the system each time, which takes longer than to fill it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def matrix(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the shape of a block; valid until the next call."""
        return self._get("matrix", like.shape, dtype, like.device)

    def vector(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for one row of a block; valid until the next call."""
        return self._get("vector", like.shape[1:], dtype, like.device)

    def _get(self, use: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        found = self._views.get((dtype, shape))
        return self._new_view(use, shape, dtype) if found is None else found

    @torch.inference_mode(False)  # a tensor of inference mode could not be used outside of it
    def _new_view(self, use: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        memory = self._memory.get((use, dtype))
        if memory is None or len(memory) < shape.numel():
            memory = self._memory[use, dtype] = torch.empty(shape.numel(), dtype=dtype, device="cpu")
            self._views.clear()  # they may keep the smaller memory
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        view = self._views[dtype, shape] = memory[: shape.numel()].view(shape)
        return view


scratch = _Scratch()
