"""Pushes and measures of members on a CPU in one pass each: `kernels.c`, compiled at installation.

PyTorch's operators read and write the weights several times for the same work. Where there is no C compiler, or for
other devices and dtypes, they are used instead; see `papa.core.product`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
import zlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from papa.errors import PapaWarning

PATH = Path(__file__).with_name("libkernels.so")
DTYPES = frozenset({torch.float32, torch.bfloat16})
LEAST_BYTES_PER_THREAD = 4 << 20
"""To start a thread takes as long as to read a part of this."""

INTEGER, POINTER = ctypes.c_int64, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they could not be compiled."""
    try:
        found = ctypes.CDLL(str(PATH))
        found.papa_source.restype = ctypes.c_uint32
        is_current = found.papa_source() == zlib.crc32(PATH.with_name("kernels.c").read_bytes())
    except (OSError, AttributeError):
        is_current = not PATH.exists()
        found = None
    if not is_current:
        warnings.warn(
            f"{PATH} is of another version or another machine, so papa averages with PyTorch's operators: install papa "
            "again",
            PapaWarning,
            stacklevel=2,
        )
    if found is None or not is_current:
        return None
    rows = (POINTER, INTEGER, INTEGER, INTEGER, INTEGER, INTEGER)
    found.papa_push.argtypes = (*rows, ctypes.c_float, POINTER)
    for function in (found.papa_squared_distances, found.papa_sums):
        function.argtypes = (*rows, INTEGER, POINTER)
    for function in (found.papa_push, found.papa_squared_distances, found.papa_sums):
        function.restype = None
    return found


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of this kind can be averaged by the compiled functions."""
    return dtype in DTYPES and device.type == "cpu" and library() is not None


def is_plain(columns: Tensor) -> bool:
    """Whether `columns` are numbers in memory, those of a row next to each other; the functions below need that."""
    size, width = columns.shape
    stride, step = columns.stride()
    return type(columns) is Tensor and (step == 1 or width < 2) and (stride >= width or size < 2)


def push_(columns: Tensor, own: float, weights: Tensor | None = None) -> None:
    """`columns <- own * columns + weights @ columns`, in float32; None for equal weights that sum to `1 - own`."""
    if not columns.is_inference():
        torch.autograd.graph.increment_version(columns)
    if weights is None:
        _call("papa_push", columns, 1.0 - own, None)
        return
    if weights.dtype != torch.float32 or weights.shape != columns.shape[:1] or weights.device.type != "cpu":
        raise ValueError(f"the weights are {weights}, expected {len(columns)} in float32")
    weights = weights.contiguous()
    _call("papa_push", columns, 1.0 - own, weights.data_ptr())


def measured(what: Literal["squared_distances", "sums"], columns: Tensor, width: int) -> Tensor:
    """The squared distance of each row to the mean row, or its sum, for each block of `width` columns, in float64."""
    results = torch.empty(-(-columns.shape[1] // width), len(columns), dtype=torch.float64, device="cpu")
    _call(f"papa_{what}", columns, width, results.data_ptr())
    return results


def _call(name: str, columns: Tensor, *args: float | None) -> None:
    size, width = columns.shape
    is_bfloat16 = columns.dtype == torch.bfloat16
    num_bytes = size * width * (2 if is_bfloat16 else 4)
    num_threads = max(1, min(torch.get_num_threads(), num_bytes // LEAST_BYTES_PER_THREAD))
    getattr(library(), name)(columns.data_ptr(), columns.stride(0), size, width, is_bfloat16, num_threads, *args)
