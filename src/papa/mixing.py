"""The small matrices: every averaging rule is one product `W <- A W`, and here are the `A`.

Row `j` of `A` says what member `j` becomes: a weighted mean of all members. So every row is non-negative and sums
to 1 (row-stochastic). The population mean is preserved exactly when the columns sum to 1 too. All functions are pure
and return float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from papa.errors import MixingError

ROW_SUM_TOLERANCE = 1e-6


def identity(size: int) -> Tensor:
    """Every member stays what it is."""
    return torch.eye(size, dtype=torch.float64, device="cpu")


def push(size: int, keep: float) -> Tensor:
    """Every member moves toward the mean: `a I + (1 - a)/p`, where `a` is `keep` (PAPA).

    Contracts every distance between members by exactly `a`; the identity at `a = 1`, `merge_all` at `a = 0`.
    """
    return keep * identity(size) + (1.0 - keep) * merge_all(size)


def push_strength(matrix: Tensor) -> float | None:
    """The `keep` for which `matrix` is `push(size, keep)`, or None when there is none.

    Example:
        >>> round(push_strength(push(4, 0.9)), 6), push_strength(merge_all(3)), push_strength(torch.eye(2).roll(1, 0))
        (0.9, 0.0, None)
    """
    size = len(matrix)
    keep = float(matrix[0, 0] - matrix[0, -1]) if size > 1 else 1.0
    is_push = 0.0 <= keep <= 1.0 and torch.allclose(matrix, push(size, keep), rtol=0.0, atol=1e-12)
    return keep if is_push else None


def merge_all(size: int) -> Tensor:
    """Every member becomes the mean of all: `1/p` everywhere (PAPA-all)."""
    return torch.full((size, size), 1.0 / size, dtype=torch.float64, device="cpu")


def merge_pairs(
    size: int,
    generator: torch.Generator,
    *,
    share: float = 0.5,
    num_children: int | None = None,
    chances: Tensor | None = None,
) -> Tensor:
    """Every child is a mean of two distinct members drawn at random, afresh for each (PAPA-2).

    Args:
        size: the number of members.
        generator: where the pairs are drawn from.
        share: the weight of the first of the two; 1/2 in PAPA-2, 3/4 in the paper's pair-75.
        num_children: how many rows; as many as there are members when None.
        chances: how likely each member is to be drawn, up to a factor; equally likely when None.
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
        row[parents] = torch.tensor([share, 1.0 - share], dtype=torch.float64)
    return matrix


def fitness(losses: Sequence[float]) -> Tensor:
    """How likely each member is to be drawn as a parent in a tournament: proportional to `1/loss`.

    A member whose loss is not finite is never drawn, as long as two others are there.
    """
    values = torch.tensor(losses, dtype=torch.float64, device="cpu")
    chances = torch.where(torch.isfinite(values), 1.0 / values.clamp(min=1e-12), 0.0)
    return chances / chances.sum() if int((chances > 0).sum()) >= 2 else torch.full_like(values, 1.0 / len(values))


def merge_many(size: int, *, share: float = 0.5) -> Tensor:
    """Every member keeps `share` of itself; the rest is spread over all others (many-half, many-75)."""
    if size == 1:
        return identity(1)
    rest = (1.0 - share) / (size - 1)
    return torch.full((size, size), rest, dtype=torch.float64, device="cpu") + (share - rest) * identity(size)


def soup_row(size: int, chosen: Sequence[int]) -> Tensor:
    """The row of a soup: `1/n` at the `n` chosen members."""
    row = torch.zeros(size, dtype=torch.float64, device="cpu")
    row[list(chosen)] = 1.0 / len(chosen)
    return row


def among(matrix: Tensor, members: Sequence[int], size: int) -> Tensor:
    """A matrix for some members only, as one for all `size`: the others become the mean of those, and count nowhere."""
    whole = soup_row(size, members).repeat(size, 1)
    for row, member in zip(matrix, members, strict=True):
        whole[member] = 0.0
        whole[member, list(members)] = row
    return whole


def check_rows(matrix: Any, size: int | None = None) -> Tensor:
    """`matrix` as float64, or a `MixingError` that says why it cannot mix a population of `size`; None for of any."""
    try:
        dense = matrix.to_dense() if isinstance(matrix, Tensor) and matrix.layout != torch.strided else matrix
        checked = torch.as_tensor(dense, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError) as error:
        expected = "a function, or as many rows as columns" if size is None else f"{size} rows of {size} numbers"
        raise MixingError(f"mixing matrix cannot be read ({error}), expected {expected}") from error
    if size is None and (checked.dim() != 2 or checked.shape[0] != checked.shape[1] or not len(checked)):
        raise MixingError(
            f"mixing matrix has shape {tuple(checked.shape)}, expected a function, or as many rows as columns"
        )
    if size is not None and checked.shape != (size, size):
        raise MixingError(
            f"mixing matrix has shape {tuple(checked.shape)}, expected ({size}, {size}): "
            f"one row and one column for each of the {size} members"
        )
    for row, weights in enumerate(checked):
        check_row(weights, subject=f"row {row} of the mixing matrix")
    sums = checked.sum(dim=1, keepdim=True)
    # Rows that are off by more than rounding would scale the weights a little at every mix.
    return checked if (sums - 1.0).abs().max() < 1e-12 else checked / sums


def check_row(weights: Tensor, *, subject: str) -> None:
    """Raise a `MixingError` about `subject` unless the weights are finite, non-negative and sum to 1."""
    if not torch.isfinite(weights).all():
        raise MixingError(f"{subject} is {weights.tolist()}, expected finite weights")
    if (weights < 0).any():
        raise MixingError(f"{subject} is {weights.tolist()}, expected no negative weight")
    total = float(weights.sum())
    if abs(total - 1.0) > ROW_SUM_TOLERANCE:
        raise MixingError(f"{subject} sums to {total:.6g}, expected 1: divide it by its sum")


def exact_in_float32(matrix: Tensor) -> Tensor:
    """The nearest rows that float32 can hold and that still sum to exactly 1.

    Rounding each weight on its own leaves a row a few 1e-8 off 1, always to the same side; over tens of thousands of
    pushes that scales every weight of every network. Multiples of 2^-24 are exact in float32, so each row is rounded
    to those and its largest weight takes up the remainder.
    """
    units = torch.round(matrix * 2.0**24)
    largest = units.argmax(dim=1, keepdim=True)
    missing = 2.0**24 - units.sum(dim=1, keepdim=True)
    return (units.scatter_add(1, largest, missing) * 2.0**-24).to(torch.float32)
