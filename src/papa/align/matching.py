"""Matching by weights: permute one network's units until its tensors are as close to another's as they get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from papa import flat
from papa.align.blocks import Piece, pieces_of
from papa.align.derive import symmetries
from papa.align.groups import Group, Slot, Symmetries
from papa.align.permute import found_tensor, permute_slot_
from papa.errors import MemberError, PapaError
from papa.streams import stream

GAIN = 1e-9
"""What a group must gain, in units of one tensor's cosine, to be permuted."""
MOST_ROUNDS = 100
"""How often all groups are gone through at most; it is rarely more than ten."""


@dataclass(frozen=True)
class Alignment:
    """How well two networks matched."""

    before: float
    """The mean cosine between the tensors of the two, over all that can be permuted, as they came."""
    after: float
    """The same after permuting; never less."""
    num_rounds: int
    """How often all groups were gone through."""


@torch.no_grad()
def align_(
    model: nn.Module,
    reference: nn.Module,
    example_input: Any = None,
    *,
    groups: Symmetries | None = None,
    seed: int = 0,
) -> Alignment:
    """Permute a network's units to match another's, without changing its function.

    Coordinate descent over the groups of units: with all others as they are, the permutation P of one group that
    maximises the sum over its tensors of

        <reference, P model> / (|reference| |model|)

    is a linear assignment. Groups are gone through in random order until none gains. Where units live in blocks
    (attention heads, groups of channels), units are matched inside each pair of blocks first, then the blocks.

    Example:
        >>> reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> alignment = align_(model, reference, torch.randn(3, 4))
        >>> alignment.after >= alignment.before
        True

    Args:
        model: the network to permute in place; its tensors keep their memory, and it is untouched when anything fails.
        reference: the network to match, unchanged.
        example_input: one batch of inputs, from which the symmetries are derived.
        groups: the symmetries of this architecture when they are known already, in place of `example_input`.
        seed: of the order in which groups are gone through.

    Returns:
        How well the two match before and after.
    """
    if (example_input is None) == (groups is None):
        raise PapaError("align_ needs either `example_input` or `groups`, to know which units can be permuted")
    mine, theirs = matched_tensors(model, reference)
    found = groups if groups is not None else symmetries(model, example_input)
    names = {slot.tensor: found_tensor(mine, slot) for group in found for slot in group.slots}
    work = _Matching({name: mine[name] for name in names}, {name: theirs[name] for name in names})
    before = work.objective(names)
    rounds = work.descend_(found, seed)
    after = work.objective(names)
    for name in names:
        mine[name].copy_(work.model[name])
    count = max(sum(scale > 0 for scale in work.scale.values()), 1)
    return Alignment(before / count, after / count, rounds)


def matched_tensors(model: nn.Module, reference: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of two networks by name, or an error that says where they differ."""
    mine = {name: tensor for name, _, _, _, tensor in flat.tensors_of(model)}
    theirs = {name: tensor for name, _, _, _, tensor in flat.tensors_of(reference)}
    cure = "only networks of one architecture can be aligned"
    for name in sorted(mine.keys() ^ theirs.keys()):
        side, other = ("model", "reference") if name in mine else ("reference", "model")
        raise MemberError(f"the {side} has '{name}', the {other} has not: {cure}")
    for name, tensor in mine.items():
        shape, expected = tuple(tensor.shape), tuple(theirs[name].shape)
        if shape != expected:
            raise MemberError(f"the model has '{name}' of shape {shape}, the reference {expected}: {cure}")
        for subject, found in (("model", tensor), ("reference", theirs[name])):
            if tensor.is_floating_point() and not bool(torch.isfinite(found).all()):
                raise MemberError(f"the {subject} has '{name}' with values that are not finite: it cannot be matched")
    return mine, theirs


class _Matching:
    """Working copies of the tensors of two networks, each divided by its norm where they are compared."""

    def __init__(self, model: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
        self.model = {name: tensor.detach().clone() for name, tensor in model.items()}
        self.reference = {name: reference[name].detach().to(tensor) for name, tensor in model.items()}
        norms = {name: _norm(tensor) * _norm(self.reference[name]) for name, tensor in self.model.items()}
        self.scale = {name: 1.0 / norm if norm > 0 else 0.0 for name, norm in norms.items()}

    def objective(self, names: Iterable[str]) -> float:
        """The sum of cosines between tensors."""
        return sum(
            float((self.model[name].double() * self.reference[name].double()).sum()) * self.scale[name]
            for name in names
        )

    def descend_(self, groups: Symmetries, seed: int) -> int:
        """Improve group after group until a whole round brings nothing."""
        inner = {id(group) for group in groups if group.is_inner}
        pieces = {group.name: pieces_of(group, groups) for group in groups if id(group) not in inner}
        for round_ in range(MOST_ROUNDS):
            order = torch.randperm(len(groups), generator=stream(seed, "align", position=round_))
            gains = [self._improve_(groups.groups[number], pieces) for number in order.tolist()]
            if not any(gains):
                return round_ + 1
        return MOST_ROUNDS

    def _improve_(self, group: Group, pieces: Mapping[str, list[Piece]]) -> bool:
        """Find the group's best permutation, with that of the units inside its blocks; keep it if there is a gain."""
        touched = {slot.tensor for slot in group.slots}
        for piece in pieces.get(group.name, []):
            touched |= {slot.tensor for inner in piece.groups for slot in inner.slots}
        kept = {name: self.model[name].clone() for name in touched}
        before = self.objective(touched)
        order, inner_orders = self._best(group, pieces.get(group.name, []))
        for slot in group.slots:
            permute_slot_(self.model[slot.tensor], slot, order)
        for inner, inner_order in inner_orders:
            for slot in inner.slots:
                permute_slot_(self.model[slot.tensor], slot, inner_order)
        if self.objective(touched) > before + GAIN:
            return True
        self.model.update(kept)
        return False

    def _best(self, group: Group, pieces: list[Piece]) -> tuple[Tensor, list[tuple[Group, Tensor]]]:
        gain = self._similarity(group.slots, pieces)
        choices = []
        for piece in pieces:
            similarity = self._piece_similarity(group.slots, piece)
            values, chosen = assign_all(similarity)
            gain = gain + values
            choices.append(chosen)
        order = assign(gain)
        inner = [
            (piece.groups[block], chosen[block][int(order[block])])
            for piece, chosen in zip(pieces, choices, strict=True)
            for block in range(group.size)
        ]
        return order, inner

    def _similarity(self, slots: tuple[Slot, ...], pieces: list[Piece]) -> Tensor:
        """For each pair of units, how alike they are; numbers that belong to a piece are left out."""
        total = torch.zeros((), dtype=torch.float64)
        size = len(slots[0].index)
        for number, slot in enumerate(slots):
            free = torch.ones(slot.index.shape[1], dtype=torch.bool)
            for piece in pieces:
                free[piece.columns[number].flatten()] = False
            rows = [self._rows(side, slot, slot.index[:, free]) for side in (self.reference, self.model)]
            total = total + (rows[0] @ rows[1].T).double() * self.scale[slot.tensor]
        return total.expand(size, size)

    def _piece_similarity(self, slots: tuple[Slot, ...], piece: Piece) -> Tensor:
        """For each pair of blocks, for each pair of the piece's units in them: how alike they are."""
        size, num_units = len(slots[0].index), piece.groups[0].size
        total = torch.zeros(size, size, num_units, num_units, dtype=torch.float64)
        for number, slot in enumerate(slots):
            index = slot.index[:, piece.columns[number].flatten()].reshape(size * num_units, -1)
            if index.numel():
                rows = [self._rows(side, slot, index) for side in (self.reference, self.model)]
                alike = (rows[0] @ rows[1].T).double() * self.scale[slot.tensor]
                total += alike.view(size, num_units, size, num_units).transpose(1, 2)
        return total

    def _rows(self, side: Mapping[str, Tensor], slot: Slot, index: Tensor) -> Tensor:
        tensor = side[slot.tensor] if slot.within is None else side[slot.tensor][slot.within[0] : slot.within[1]]
        tensor = tensor if tensor.element_size() >= 4 else tensor.float()
        chosen = tensor.index_select(slot.axis, index.flatten().to(tensor.device)).movedim(slot.axis, 0)
        return chosen.reshape(len(index), -1).cpu()


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def assign(gain: Tensor) -> Tensor:
    """The permutation with the largest sum of `gain[i, permutation[i]]`."""
    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def assign_all(similarity: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """For each pair of blocks the best permutation of the units in them, and what it is worth."""
    chosen = [[assign(pair) for pair in row] for row in similarity]
    values = [
        [float(pair[torch.arange(len(order)), order].sum()) for pair, order in zip(row, orders, strict=True)]
        for row, orders in zip(similarity, chosen, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64), chosen
