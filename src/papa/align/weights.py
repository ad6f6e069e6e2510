"""Matching by weights: the cosine between the tensors of networks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from papa.align.assignment import Comparison, Permutations
from papa.align.nesting import nested_groups
from papa.align.permute import permute_axis_, require_tensor
from papa.align.unit_groups import Symmetries, TensorAxis


class WeightObjective:
    """The similarity of networks by their weights: for networks a and b with permutations P, the sum over tensors of

        <P_a a, P_b b> / (|a| |b|)

    Args:
        networks: the tensors of each network by name.
        symmetries: the groups that can be permuted.
    """

    def __init__(self, networks: Sequence[Mapping[str, Tensor]], symmetries: Symmetries) -> None:
        self.groups = nested_groups(symmetries)
        self._symmetries = symmetries
        axes = [axis for group in symmetries for axis in group.axes]
        for axis in axes:
            require_tensor(networks[0], axis)
        names = dict.fromkeys(axis.tensor for axis in axes)
        self._networks = [_NormalisedTensors({name: network[name] for name in names}) for network in networks]
        self.count = max(sum(bool(networks[0][name].any()) for name in names), 1)
        """The number of cosines in the sum."""

    def compare(self, member: int, others: Collection[int]) -> WeightComparison:
        """One network with the sum of some others."""
        own, references = dict(self._networks[member]), [self._networks[other] for other in others]
        if len(references) == 1:
            return WeightComparison(own, references[0])
        return WeightComparison(own, {name: torch.stack([its[name] for its in references]).sum(0) for name in own})

    def permute_(self, member: int, permutations: Permutations) -> None:
        """Permute the units of one network, in this comparison only."""
        for name, permutation in permutations.items():
            for axis in self._symmetries[name].axes:
                self._networks[member].permute_(axis, permutation)


class _NormalisedTensors(Mapping[str, Tensor]):
    """The tensors of a network, copied and divided by their norm on access; only permuted ones are kept in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._norms = {name: float(tensor.detach().double().norm()) for name, tensor in tensors.items()}
        self._permuted: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._permuted:
            return self._permuted[name].clone()
        tensor, norm = self._tensors[name], self._norms[name]
        wide = tensor.detach().to(device="cpu", dtype=torch.promote_types(tensor.dtype, torch.float32), copy=True)
        return wide.div_(norm) if norm > 0 else wide

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def permute_(self, axis: TensorAxis, permutation: Tensor) -> None:
        """Permute one tensor; the network itself is not changed."""
        self._permuted[axis.tensor] = self[axis.tensor]
        permute_axis_(self._permuted[axis.tensor], axis, permutation)


class WeightComparison(Comparison):
    """The tensors of one network and of its reference."""

    def __init__(self, tensors: dict[str, Tensor], reference: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.reference = reference

    def unit_similarity(self, axis: TensorAxis, index: Tensor) -> Tensor:
        """The inner products of the numbers that units own in one tensor."""
        own, reference = self.tensors[axis.tensor], self.reference[axis.tensor]
        return unit_rows(reference, axis, index) @ unit_rows(own, axis, index).T

    def similarity(self, name: str) -> float:
        """The cosine between the networks' tensors."""
        return float((self.tensors[name].double() * self.reference[name].double()).sum())


def unit_rows(tensor: Tensor, axis: TensorAxis, index: Tensor) -> Tensor:
    """All numbers that each unit owns in a tensor, one row per unit."""
    part = axis.view(tensor)
    return part.index_select(axis.dim, index.flatten()).movedim(axis.dim, 0).reshape(len(index), -1)
