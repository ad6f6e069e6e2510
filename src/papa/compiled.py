"""Averaging in one process, compiled by `torch.compile`: one pass that measures the members, one that pushes them.

PyTorch's own operators read and write a block of columns several times for the same work; see `papa.product` and
`papa.row_measures`, whose results these functions have but for rounding.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from papa.errors import PapaError
from papa.product import column_blocks, exact_push, push_blocks_

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MAX_ROWS = 16
"""The code has a line for each row, and takes longer to compile with more of them."""

T = TypeVar("T")


def supports(rows: Tensor) -> bool:
    """Whether a matrix can be averaged by compiled code."""
    return rows.dtype in DTYPES and 2 <= len(rows) <= MAX_ROWS


def squared_distances(rows: Tensor) -> Tensor:
    """`papa.row_measures.squared_distances` in one pass."""
    return _call(_squared_distances, rows.unbind())


def push_(rows: Tensor, keep: float) -> None:
    """`papa.product.push_blocks_` in one pass."""
    push = exact_push(len(rows), keep)
    if push is None:  # members keep nothing of themselves
        push_blocks_(column_blocks(rows), keep)
    elif push[1]:
        # Numbers of Python would be compiled into the code, once for every strength.
        _call(_push_, rows.unbind(), *torch.tensor(push, dtype=torch.float32, device="cpu").unbind())


def _squared_distances(rows: Sequence[Tensor]) -> Tensor:
    wide = [row.float() for row in rows]
    mean = sum(wide[1:], start=wide[0]) * (1.0 / len(wide))
    return torch.stack([(row - mean).square().sum(dtype=torch.float64) for row in wide])


def _push_(rows: Sequence[Tensor], own: Tensor, common: Tensor) -> None:
    wide = [row.float() for row in rows]
    shared = sum((row * common for row in wide[1:]), start=wide[0] * common)  # the sum itself might overflow
    for row, number in zip(rows, wide, strict=True):
        row.copy_(number * own + shared)


@functools.cache
def _compiled(function: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    """One for each number of rows, of code of its own: after a few variants of one code, PyTorch compiles no more."""
    code: types.CodeType = function.__code__.replace()
    return torch.compile(types.FunctionType(code, function.__globals__), dynamic=True)


@torch.no_grad()
def _call(function: Callable[..., T], rows: Sequence[Tensor], *args: Tensor) -> T:
    try:
        result: T = _compiled(function, len(rows))(rows, *args)
    except Exception as error:  # of many kinds, by what is missing
        first_line = str(error).strip().partition("\n")[0]
        raise PapaError(
            f"torch.compile fails here ({first_line}), so members were not averaged: install what it needs, such as a "
            "C++ compiler, or make the population without compile=True"
        ) from error
    return result
