"""Matching by weights: the cosine between the tensors of networks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

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
        self.networks = [Units({name: network[name] for name in names}) for network in networks]
        self.count = max(sum(bool(networks[0][name].any()) for name in names), 1)
        """How many cosines the likeness of two networks is the sum of."""

    def matching(self, member: int, others: Collection[int]) -> WeightsMatching:
        """One network in comparison with the sum of some others."""
        mine = self.networks[member].copied()
        several = [self.networks[other] for other in others]
        if len(several) == 1:
            return WeightsMatching(mine, several[0])
        return WeightsMatching(mine, {name: torch.stack([its[name] for its in several]).sum(0) for name in mine})

    def permute_(self, member: int, orders: Orders) -> None:
        """Reorder the units of one network, group after group."""
        for name, order in orders.items():
            for slot in self.symmetries[name].slots:
                self.networks[member].permute_(slot, order)


class Units(Mapping[str, Tensor]):
    """The tensors of a network by name, each brought to length 1 when it is asked for; only permuted ones are copies.

    Args:
        tensors: the network's, never changed.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._norms = {name: float(tensor.detach().double().norm()) for name, tensor in tensors.items()}
        self._permuted: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._permuted[name] if name in self._permuted else self._unit(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _unit(self, name: str) -> Tensor:
        """A copy of length 1 on the CPU, in float32 or better; zeros stay zeros."""
        tensor, norm = self._tensors[name], self._norms[name]
        wide = tensor.detach().to(device="cpu", dtype=torch.promote_types(tensor.dtype, torch.float32), copy=True)
        return wide.div_(norm) if norm > 0 else wide

    def copied(self) -> dict[str, Tensor]:
        """All of them, in memory of their own."""
        return {
            name: self._permuted[name].clone() if name in self._permuted else self._unit(name) for name in self._tensors
        }

    def permute_(self, slot: Slot, order: Tensor) -> None:
        """Reorder one tensor along one slot, here alone."""
        name = slot.tensor
        self._permuted[name] = self[name]
        permute_slot_(self._permuted[name], slot, order)


class WeightsMatching:
    """Working copies of the tensors of one network, and what they are compared with."""

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
