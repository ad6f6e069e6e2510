"""Matching by weights: the cosine between the tensors of networks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from papa.align.assignment import Orders
from papa.align.blocks import Family, families_of
from papa.align.groups import Slot, Symmetries
from papa.align.permute import found_tensor, permute_slot_


class Weights:
    """The tensors of several networks that can be permuted, each divided by its norm.

    For networks a and b with permutations P, a tensor's likeness is

        <P_a a, P_b b> / (|a| |b|)

    and the networks' the sum over tensors.

    Args:
        networks: the tensors of each by name.
        symmetries: what can be permuted in them.
    """

    def __init__(self, networks: Sequence[Mapping[str, Tensor]], symmetries: Symmetries) -> None:
        self.symmetries = symmetries
        self.families: list[Family] = families_of(symmetries)
        names = {slot.tensor: found_tensor(networks[0], slot) for group in symmetries for slot in group.slots}
        self.networks = [{name: _unit(network[name]) for name in names} for network in networks]
        self.count = max(sum(bool(tensor.any()) for tensor in self.networks[0].values()), 1)
        """How many cosines the likeness of two networks is the sum of."""

    def matching(self, member: int, others: Collection[int]) -> WeightsMatching:
        """One network in comparison with the sum of some others."""
        mine = {name: tensor.clone() for name, tensor in self.networks[member].items()}
        others = list(others)
        theirs = {name: torch.stack([self.networks[other][name] for other in others]).sum(0) for name in mine}
        return WeightsMatching(mine, theirs)

    def permute_(self, member: int, orders: Orders) -> None:
        """Reorder the units of one network, group after group."""
        for name, order in orders.items():
            for slot in self.symmetries[name].slots:
                permute_slot_(self.networks[member][slot.tensor], slot, order)


class WeightsMatching:
    """Working copies of the tensors of two networks."""

    def __init__(self, model: dict[str, Tensor], reference: Mapping[str, Tensor]) -> None:
        self.tensors = model
        self.reference = reference

    def likeness(self, slot: Slot, index: Tensor) -> Tensor:
        """The inner product of all numbers that two units own in one tensor."""
        return rows_of(self.reference[slot.tensor], slot, index) @ rows_of(self.tensors[slot.tensor], slot, index).T

    def value(self, name: str) -> float:
        """The cosine between the two networks' tensors."""
        return float((self.tensors[name].double() * self.reference[name].double()).sum())


def rows_of(tensor: Tensor, slot: Slot, index: Tensor) -> Tensor:
    """All numbers that each unit owns in a tensor, one row per unit."""
    part = tensor if slot.within is None else tensor[slot.within[0] : slot.within[1]]
    return part.index_select(slot.axis, index.flatten()).movedim(slot.axis, 0).reshape(len(index), -1)


def _unit(tensor: Tensor) -> Tensor:
    """A copy of length 1 on the CPU, in float32 or better; zeros stay zeros."""
    wide = tensor.detach().to(device="cpu", dtype=torch.promote_types(tensor.dtype, torch.float32), copy=True)
    norm = float(wide.double().norm())
    return wide.div_(norm) if norm > 0 else wide
