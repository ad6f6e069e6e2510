"""Mixing matrices: the `A` of `W <- A W`.

A population is a matrix `W` with one row per member and one column per number of the network. Averaging members is
one product, `W <- A W`, with a small matrix `A`: row `j` of `A` holds the weights of the mean that member `j` becomes.
So the entries of a row sum to 1; for most rules they are also non-negative (`A` is row-stochastic). If the columns sum
to 1 as well, the mean of the population does not change.

Every averaging rule is a choice of `A`; the functions here compute them, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from papa.errors import MixingError

ROW_SUM_TOLERANCE = 1e-6


def identity(size: int) -> Tensor:
    """No change: every member stays the same."""
    return torch.eye(size, dtype=torch.float64, device="cpu")


def push(size: int, keep: float) -> Tensor:
    """Move every member toward the mean: `a I + (1 - a)/p`, where `a` is `keep` (PAPA).

    All distances between members shrink by the factor `a`. `a = 1` is the identity, `a = 0` is `merge_all`.
    """
    rest = (1.0 - keep) * (1.0 / size)
    return torch.full((size, size), rest, dtype=torch.float64, device="cpu").fill_diagonal_(keep + rest)


def push_to(row: Tensor, keep: float) -> Tensor:
    """Move every member toward one weighted mean: `a I + (1 - a) 1 v^T`, where `a` is `keep` and `v` is `row`."""
    return keep * identity(len(row)) + (1.0 - keep) * row.to(torch.float64).expand(len(row), len(row))


def push_strength(matrix: Tensor) -> float | None:
    """The `keep` for which `matrix` equals `push(size, keep)`, or None if it is not a push.

    Example:
        >>> round(push_strength(push(4, 0.9)), 6), push_strength(merge_all(3)), push_strength(torch.eye(2).roll(1, 0))
        (0.9, 0.0, None)
    """
    size = len(matrix)
    keep = float(matrix[0, 0] - matrix[0, -1]) if size > 1 else 1.0
    is_push = 0.0 <= keep <= 1.0 and torch.allclose(matrix, push(size, keep), rtol=0.0, atol=1e-12)
    return keep if is_push else None


def merge_all(size: int) -> Tensor:
    """Replace every member by the mean of all: `1/p` everywhere (PAPA-all)."""
    return torch.full((size, size), 1.0 / size, dtype=torch.float64, device="cpu")


def merge_pairs(
    size: int,
    generator: torch.Generator,
    *,
    share: float = 0.5,
    num_children: int | None = None,
    chances: Tensor | None = None,
) -> Tensor:
    """Replace every member by the mean of two different members, drawn independently for each (PAPA-2).

    `share` is the weight of the first of the two. There are `num_children` rows, by default `size`. Members are drawn
    with probabilities proportional to `chances`, by default uniformly.
    """
    num_children = size if num_children is None else num_children
    if size == 1:
        return identity(1).expand(num_children, 1).clone()
    matrix = torch.zeros(num_children, size, dtype=torch.float64, device="cpu")
    for row in matrix:
        if chances is None:
            parents = torch.randperm(size, generator=generator, device="cpu")[:2]
        else:
            parents = torch.multinomial(chances, 2, generator=generator)
        row[parents] = torch.tensor([share, 1.0 - share], dtype=torch.float64, device="cpu")
    return matrix


def fitness(losses: Sequence[float]) -> Tensor:
    """The probability of drawing each member as a parent, proportional to `1/loss`.

    A member with a non-finite loss has probability 0. If fewer than two members remain, all are equally likely.
    """
    values = torch.tensor(losses, dtype=torch.float64, device="cpu")
    chances = torch.where(torch.isfinite(values), 1.0 / values.clamp(min=1e-12), 0.0)
    return chances / chances.sum() if int((chances > 0).sum()) >= 2 else torch.full_like(values, 1.0 / len(values))


def merge_many(size: int, *, share: float = 0.5) -> Tensor:
    """Weight `share` for the member itself, and the rest spread evenly over all others (many-half, many-75)."""
    if size == 1:
        return identity(1)
    rest = (1.0 - share) / (size - 1)
    return torch.full((size, size), rest, dtype=torch.float64, device="cpu") + (share - rest) * identity(size)


def soup_row(size: int, chosen: Sequence[int]) -> Tensor:
    """The weights of a soup: `1/n` for each of the `n` chosen members, 0 for the others."""
    row = torch.zeros(size, dtype=torch.float64, device="cpu")
    row[list(chosen)] = 1.0 / len(chosen)
    return row


def among(matrix: Tensor, members: Sequence[int], size: int) -> Tensor:
    """Extend a matrix for some members to all `size` members.

    All others get weight 0 everywhere, and become the mean of `members`.
    """
    whole = soup_row(size, members).repeat(size, 1)
    for row, member in zip(matrix, members, strict=True):
        whole[member] = 0.0
        whole[member, list(members)] = row
    return whole


def check_rows(matrix: Any, size: int | None = None, *, signed: bool = False) -> Tensor:
    """Convert `matrix` to float64, or raise a `MixingError` if its rows do not sum to 1 or have negative weights.

    It is anything that `torch.as_tensor` takes; a size of None accepts any square matrix. Weights may be negative if
    `signed`.
    """
    expected = "a function, or as many rows as columns" if size is None else f"{size} rows of {size} numbers"
    try:
        dense = matrix.to_dense() if isinstance(matrix, Tensor) and matrix.layout != torch.strided else matrix
        checked = torch.as_tensor(dense, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError) as error:
        raise MixingError(f"mixing matrix cannot be read ({error}), expected {expected}") from error
    shape = tuple(checked.shape)
    if size is None and (len(shape) != 2 or shape[0] != shape[1] or not shape[0]):
        raise MixingError(f"mixing matrix has shape {shape}, expected {expected}")
    if size is not None and shape != (size, size):
        raise MixingError(
            f"mixing matrix has shape {shape}, expected ({size}, {size}): "
            f"one row and one column for each of the {size} members"
        )
    sums = checked.sum(dim=1, keepdim=True)
    worst, lowest = float((sums - 1.0).abs().max()), float(checked.min())
    if not worst <= ROW_SUM_TOLERANCE or (lowest < 0 and not signed):  # NaN is in no order
        for row, weights in enumerate(checked):
            check_row(weights, subject=f"row {row} of the mixing matrix", signed=signed)
    # A sum that differs from 1 by more than rounding would scale all weights a little at every mix.
    return checked if worst < 1e-12 else checked / sums


def check_row(weights: Tensor, *, subject: str, signed: bool = False) -> None:
    """Raise a `MixingError` about `subject` unless the weights are finite, non-negative (or signed) and sum to 1."""
    if not torch.isfinite(weights).all():
        raise MixingError(f"{subject} is {weights.tolist()}, expected finite weights")
    if not signed and (weights < 0).any():
        raise MixingError(f"{subject} is {weights.tolist()}, expected no negative weight")
    total = float(weights.sum())
    if abs(total - 1.0) > ROW_SUM_TOLERANCE:
        raise MixingError(f"{subject} sums to {total:.6g}, expected 1: divide it by its sum")


def exact_in_float32(matrix: Tensor, points: Tensor | None = None) -> Tensor:
    """Round a matrix to float32 such that every row still sums to exactly what it did: 1.

    If every weight were rounded separately, a row would sum to 1 + 1e-8 or so, always with the same sign, and tens of
    thousands of pushes would scale the weights of every network. Multiples of 2^-24 are exact in float32 up to 1: every
    weight is rounded to one (of a larger power of 2 if weights are larger), and the largest of the row absorbs the
    remainder.

    `points` says which rows and columns are points, not differences of points; None for all. Only the weights of points
    are summed, to 1 in the row of a point and to 0 in that of a difference.
    """
    unit = 2.0 ** (max(0, math.ceil(math.log2(max(1.0, float(matrix.abs().max()))))) - 24)
    units = torch.round(matrix / unit)
    are_points = torch.ones(len(matrix), dtype=torch.bool, device="cpu") if points is None else points
    sums = torch.where(are_points, 1.0 / unit, 0.0).double() if points is not None else 1.0 / unit
    of_points = torch.where(are_points, units, 0.0)
    largest = torch.where(are_points, units, -math.inf).argmax(dim=1, keepdim=True)
    missing = (sums - of_points.sum(dim=1))[:, None]
    return (units.scatter_add(1, largest, missing) * unit).to(torch.float32)
