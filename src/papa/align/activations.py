"""Matching by activations: pair the units of two networks that respond alike to the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from papa.align.blocks import Piece, pieces_of
from papa.align.derive import symmetries
from papa.align.groups import Group, Program, Slot, Symmetries
from papa.align.matching import Alignment, assign, assign_all, matched_tensors
from papa.align.permute import permute_all_
from papa.errors import DataError, MemberError, PapaError


@torch.no_grad()
def align_by_activations_(
    model: nn.Module, reference: nn.Module, batches: Sequence[Any], *, groups: Symmetries | None = None
) -> Alignment:
    """Permute a network's units so that each pairs with the unit of another network that responds most like it.

    For every group, the permutation P that maximises the correlation of unit `i` of the reference with unit `P(i)` of
    the model, over all batches and summed over every place where the group is seen. Correlations do not depend on the
    order of units, so one pass over the data serves all groups.

    Example:
        >>> reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> alignment = align_by_activations_(model, reference, [torch.randn(32, 4) for _ in range(2)])
        >>> alignment.after >= alignment.before
        True

    Args:
        model: the network to permute in place; its tensors keep their memory, and it is untouched when anything fails.
        reference: the network to match, unchanged.
        batches: inputs, or tuples whose first entry is the inputs, all of one shape. Never test data.
        groups: what `symmetries` gave for this architecture and batches of this shape, when known already.

    Returns:
        The mean correlation of paired units before and after.
    """
    inputs = _checked_inputs(batches)
    tensors = matched_tensors(model, reference)
    found = groups if groups is not None else symmetries(model, inputs[0])
    if found.program is None:
        raise PapaError("symmetries written by hand have no graph: match by weights with `align_`")
    watched = {(place.tensor, place.axis) for group in found for place in group.places}
    alike = _correlations(found.program, tensors, inputs, watched)
    views = [replace(group, slots=group.places) for group in found if group.places]
    pieces = {view.name: pieces_of(view, Symmetries(tuple(views))) for view in views if not view.is_inner}
    paired = {group.name for some in pieces.values() for piece in some for group in piece.groups}
    orders: dict[str, Tensor] = {}
    before = after = 0.0
    # A group inside blocks that are no piece is matched where it stands, before blocks move.
    for view in sorted((view for view in views if view.name not in paired), key=lambda view: not view.is_inner):
        order, inner, gains = _best(view, pieces.get(view.name, []), alike)
        orders |= {view.name: order, **inner}
        before, after = before + gains[0], after + gains[1]
    permute_all_(model, found, orders)
    count = max(sum(place.index.numel() for view in views if view.name not in paired for place in view.places), 1)
    return Alignment(before / count, after / count, 1)


def _checked_inputs(batches: Sequence[Any]) -> list[Tensor]:
    inputs = [batch[0] if isinstance(batch, tuple | list) else batch for batch in batches]
    if not inputs:
        raise DataError("align_by_activations_ was given no batches, expected at least one")
    for number, part in enumerate(inputs):
        if not isinstance(part, Tensor) or part.shape != inputs[0].shape or not part.numel():
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise DataError(
                f"batch {number} has inputs of {shape}, expected {tuple(inputs[0].shape)} as batch 0: all batches need "
                "one shape and at least one example"
            )
    return inputs


class _Watcher(fx.Interpreter):
    """Runs a graph and keeps what some nodes give, units first."""

    def __init__(self, program: Program, watched: set[tuple[str, int]]) -> None:
        super().__init__(program.graph)
        self._dims = dict(watched)
        self.seen: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.name in self._dims:
            self.seen[n.name] = result.detach().double().movedim(self._dims[n.name], 0).flatten(1).clone()
        return result


def _correlations(
    program: Program,
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    inputs: list[Tensor],
    watched: set[tuple[str, int]],
) -> dict[str, Tensor]:
    """For each watched node, the correlation of each index of the reference with each index of the model."""
    model, reference = tensors
    sums: dict[str, list[Tensor]] = {}
    for batch in inputs:
        theirs, mine = (_seen(program, side, batch, watched) for side in (reference, model))
        for name in theirs:
            x, y = theirs[name], mine[name]
            if not (bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all())):
                raise MemberError(f"activations at '{name}' are not finite: networks that diverged cannot be matched")
            parts = [x.sum(1), y.sum(1), x.square().sum(1), y.square().sum(1), x @ y.T, torch.tensor(x.shape[1])]
            known = sums.get(name)
            sums[name] = parts if known is None else [a + b for a, b in zip(known, parts, strict=True)]
    return {name: _correlation(*parts) for name, parts in sums.items()}


def _correlation(x: Tensor, y: Tensor, xx: Tensor, yy: Tensor, xy: Tensor, count: Tensor) -> Tensor:
    """From sums to correlations; a unit that never varies correlates with none."""
    spread = [(square / count - (total / count).square()).clamp(min=0) for total, square in ((x, xx), (y, yy))]
    scale = (spread[0][:, None] * spread[1]).sqrt()
    covariance = xy / count - (x / count)[:, None] * (y / count)
    return torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0.0)


def _seen(
    program: Program, tensors: Mapping[str, Tensor], batch: Tensor, watched: set[tuple[str, int]]
) -> dict[str, Tensor]:
    watcher, batches = _Watcher(program, watched), iter([batch])
    args = []
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            name = node.target
            if name in program.tensors:
                args.append(tensors[program.tensors[name]].detach().cpu())
            else:
                args.append(program.constants[name] if name in program.constants else next(batches).cpu().clone())
    watcher.run(*args)
    return watcher.seen


Gains = tuple[float, float]


def _best(view: Group, pieces: list[Piece], alike: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Gains]:
    """The best order of a group's units, that of the units inside its blocks, and the gain before and after."""
    gain = torch.zeros(view.size, view.size, dtype=torch.float64)
    for number, place in enumerate(view.slots):
        free = torch.ones(place.index.shape[1], dtype=torch.bool)
        for piece in pieces:
            free[piece.columns[number].flatten()] = False
        for column in place.index[:, free].T:
            gain += alike[place.tensor][column][:, column]
    as_it_was, choices = float(gain.diagonal().sum()), []
    for piece in pieces:
        similarity = _piece_similarity(view.slots, piece, alike)
        values, chosen = assign_all(similarity)
        gain, as_it_was = gain + values, as_it_was + float(torch.einsum("iiuu->", similarity))
        choices.append(chosen)
    order = assign(gain)
    inner = {
        piece.groups[block].name: chosen[block][int(order[block])]
        for piece, chosen in zip(pieces, choices, strict=True)
        for block in range(view.size)
    }
    return order, inner, (as_it_was, float(gain[torch.arange(view.size), order].sum()))


def _piece_similarity(places: tuple[Slot, ...], piece: Piece, alike: Mapping[str, Tensor]) -> Tensor:
    size, num_units = len(places[0].index), piece.groups[0].size
    total = torch.zeros(size, size, num_units, num_units, dtype=torch.float64)
    for number, place in enumerate(places):
        index = place.index[:, piece.columns[number].flatten()].reshape(size * num_units, -1)
        for column in index.T:
            pairs = alike[place.tensor][column][:, column]
            total += pairs.view(size, num_units, size, num_units).transpose(1, 2)
    return total
