"""Matching by soft permutations: weights are averaged over units before any unit is chosen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from papa.align.assignment import GAIN, Orders, assign, compose_, family_likeness, move_, total, visits_of
from papa.align.blocks import Family
from papa.align.groups import Group, Slot
from papa.align.weights import WeightsMatching, rows_of
from papa.streams import stream

NUM_ROUNDS = 40
"""How often all groups are gone through while the temperature falls."""
HOTTEST, COLDEST = 2.0, 0.02
"""The temperature, in units of what one perfectly matched unit adds to a cosine."""
MOST_NORMALISATIONS, TOLERANCE = 60, 1e-3
"""How often rows and columns are brought to sum to 1 at most, and how near to it is enough."""


def sinkhorn(logits: Tensor) -> Tensor:
    """The doubly stochastic matrix `P` that maximises `<P, logits> + entropy(P)`, in the log domain.

    Example:
        >>> sinkhorn(torch.tensor([[9.0, 0.0], [0.0, 9.0]])).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    for _ in range(MOST_NORMALISATIONS):
        excess = logits.logsumexp(dim=-1, keepdim=True)
        logits = logits - excess
        logits = logits - logits.logsumexp(dim=-2, keepdim=True)
        if float(excess.abs().max()) < TOLERANCE:
            break
    return logits.exp()


def anneal_(matching: WeightsMatching, families: list[Family], orders: Orders, seed: int) -> int:
    """Match by soft permutations, hardened at the end.

    All groups start evenly spread. One after the other gets the soft permutation that maximises

        <reference, P model> + temperature * entropy(P)

    with all others as they are, while the temperature falls. What comes out is kept if it is a gain.

    Args:
        matching: permuted in place; its total never falls.
        families: what is matched together.
        orders: composed with what was done.
        seed: of the sequence in which families are gone through.

    Returns:
        The number of rounds.
    """
    soft = _SoftPermutations(matching, families)
    visits = visits_of(families)
    for round_, temperature in enumerate(torch.logspace(0, 1, NUM_ROUNDS, COLDEST / HOTTEST).tolist()):
        for number in torch.randperm(len(visits), generator=stream(seed, "align", position=round_)).tolist():
            soft.update_(visits[number], HOTTEST * temperature)
    found = {name: assign(matrix) for name, matrix in soft.matrices.items()}
    before, kept = total(matching), {name: tensor.clone() for name, tensor in matching.tensors.items()}
    for family in families:
        move_(matching, family, found)
    if total(matching) > before + GAIN:
        for family in families:
            compose_(orders, family, found)
    else:
        matching.tensors.update(kept)
    return NUM_ROUNDS


class _SoftPermutations:
    """A doubly stochastic matrix for each group, and the model as they permute it."""

    def __init__(self, matching: WeightsMatching, families: list[Family]) -> None:
        self._matching = matching
        groups = [family.group for family in families]
        groups += [inner for family in families for inner in list(family.members)[1:]]
        self.matrices = {
            group.name: torch.full((group.size, group.size), 1 / group.size, dtype=torch.float64) for group in groups
        }
        self._users: dict[str, list[tuple[Group, Slot]]] = {}
        for group in groups:  # blocks first, then what is inside of them
            for slot in group.slots:
                self._users.setdefault(slot.tensor, []).append((group, slot))

    def update_(self, family: Family, temperature: float) -> None:
        """Give one family the best soft permutation, hierarchically: inside every pair of blocks, then of blocks."""
        seen: dict[int, Tensor] = {}
        own = self._at_their_origin(family)

        def likeness(slot: Slot, index: Tensor) -> Tensor:
            if id(slot) not in seen:
                seen[id(slot)] = self._seen(slot, own)
            return rows_of(self._matching.reference[slot.tensor], slot, index) @ rows_of(seen[id(slot)], slot, index).T

        whole, inside = family_likeness(family, likeness)
        size, chosen = family.group.size, []
        for alike in inside:
            matrices = sinkhorn(alike * (size * alike.shape[-1] / temperature))
            whole = whole + (matrices * alike).sum(dim=(-1, -2))
            chosen.append(matrices)
        blocks = sinkhorn(whole * (size / temperature))
        self.matrices[family.group.name] = blocks
        for piece, matrices in zip(family.pieces, chosen, strict=True):
            for block, inner in enumerate(piece.groups):
                self.matrices[inner.name] = torch.einsum("b,buv->uv", blocks[block], matrices[block])

    def _at_their_origin(self, family: Family) -> dict[str, Tensor]:
        """The matrices of a family, those of units inside of blocks as they are before the blocks move."""
        blocks, own = self.matrices[family.group.name], {family.group.name: self.matrices[family.group.name]}
        for piece in family.pieces:
            inside = torch.stack([self.matrices[inner.name] for inner in piece.groups])
            for block, inner in enumerate(piece.groups):
                own[inner.name] = torch.einsum("b,buv->uv", blocks[:, block], inside)
        return own

    def _seen(self, slot: Slot, own: Mapping[str, Tensor]) -> Tensor:
        """The model's tensor as it is along the slot's axis, and permuted along all others."""
        tensor = self._matching.tensors[slot.tensor]
        for group, other in self._users[slot.tensor]:
            if group.name not in own or other.axis != slot.axis:
                tensor = _permuted(tensor, other, own.get(group.name, self.matrices[group.name]))
        return tensor


def _permuted(tensor: Tensor, slot: Slot, matrix: Tensor) -> Tensor:
    """A tensor whose units are weighted means of units."""
    changed = tensor.clone()
    part = changed if slot.within is None else changed[slot.within[0] : slot.within[1]]
    lines = part.index_select(slot.axis, slot.index.flatten()).movedim(slot.axis, 0)
    mixed = (matrix.to(lines.dtype) @ lines.reshape(len(matrix), -1)).view(lines.shape).movedim(0, slot.axis)
    part.index_copy_(slot.axis, slot.index.flatten(), mixed)
    return changed
