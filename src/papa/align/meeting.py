"""Labels of activations that meet number by number."""

from __future__ import annotations

import torch
from torch import Tensor

from papa.align.labels import UnforeseenError, compact, joint_shape, tidy, varies
from papa.align.trace import Trace


def together(trace: Trace, first: Tensor, second: Tensor) -> Tensor:
    """The labels where two activations meet number by number, with broadcasting."""
    shape = joint_shape(first.shape, second.shape)
    wide = [part[(None,) * (len(shape) - part.dim())] for part in (first, second)]
    shared = [
        [dim for dim in range(len(shape)) if mine.shape[dim] == 1 and varies(other, dim)]
        for mine, other in (wide, wide[::-1])
    ]
    first, second = (part.expand(shape) for part in wide)
    (some, others), ledger = compact(first, second), trace.ledger
    if bool((some >= 0).any()) and bool((others >= 0).any()) and (shared[0] or shared[1]):
        return _shared(trace, first, second, shared)
    both = (some >= 0) & (others >= 0)
    if bool(both.any()):
        ledger.join(some[both], others[both])
    for mine, other in ((some, others), (others, some)):
        chosen = (mine >= 0) & (other < 0)
        if bool(chosen.any()):
            ledger.colour(mine[chosen], other[chosen])
    found = torch.where(some >= 0, some, others)
    neither = (some < 0) & (others < 0)
    if bool(neither.any()):
        pairs, inverse = torch.unique(torch.stack([some[neither], others[neither]]), dim=1, return_inverse=True)
        ids = [ledger.constant(("both", ledger.count, *pair)) for pair in pairs.T.tolist()]
        found[neither] = torch.tensor(ids)[inverse]
    return tidy(found.expand(shape))


def _shared(trace: Trace, first: Tensor, second: Tensor, shared: list[list[int]]) -> Tensor:
    """One number meets many units: these are a set to it."""
    (some, others), ledger = compact(first, second), trace.ledger
    if (shared[0] and shared[1]) or bool((some < 0).any()) or bool((others < 0).any()):
        raise UnforeseenError("an outer product of units, or constants among units that share a number")
    few, many, dims = (some, others, shared[0]) if shared[0] else (others, some, shared[1])
    rows = [_full_rows(part, dims) for part in (many, few)]
    ledger.block(torch.cat([rows[0], rows[1][:, :1]], dim=1))
    return second if shared[0] else first


def _full_rows(labels: Tensor, dims: list[int]) -> Tensor:
    kept = [dim for dim in range(labels.dim()) if dim not in dims]
    return labels.permute(*kept, *dims).reshape(-1, int(torch.tensor([labels.shape[dim] for dim in dims]).prod()))
