"""Groups of exchangeable units: where in a network's tensors each unit lies, and permuting them in place."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from papa.core.layout import named_tensors
from papa.errors import MemberError, PapaError, did_you_mean

Permutation = Tensor | Sequence[int]
Permutations = dict[str, Tensor]
"""A permutation for each group, by name: blocks and single units first, then units inside blocks."""


@dataclass(frozen=True)
class TensorAxis:
    """A dimension of a tensor along which the units of a group lie."""

    tensor: str
    """The name of the parameter or buffer."""
    dim: int
    """The dimension that is permuted."""
    index: Tensor = field(repr=False)
    """Row `u` lists the indices along the dimension that belong to unit `u`, in order."""
    row_range: tuple[int, int] | None = None
    """The rows of dimension 0 (start, stop) to permute, as in one group of a grouped convolution; None for all."""

    def __str__(self) -> str:
        return f"{self.tensor} (dim {self.dim})"

    def view(self, tensor: Tensor) -> Tensor:
        """The part of the tensor that is permuted."""
        return tensor if self.row_range is None else tensor[slice(*self.row_range)]


@dataclass(frozen=True)
class UnitGroup:
    """Units that can be permuted among each other without changing the network's function."""

    name: str
    """The tensor that produces these units, with a number when it produces several groups."""
    size: int
    """The number of units."""
    axes: tuple[TensorAxis, ...]
    """All axes of parameters and buffers that have to be permuted together."""
    activations: tuple[TensorAxis, ...] = field(default=(), repr=False)
    """The units in activations: here `tensor` is the name of a node of the exported graph."""
    is_inner: bool = False
    """Whether the units lie inside one block (an attention head, a group of channels) of another group."""


@dataclass(frozen=True)
class ExportedGraph:
    """A network's graph, which runs with the tensors of any network of the same architecture."""

    module: fx.GraphModule
    """The graph that `torch.export` returned."""
    tensors: Mapping[str, str]
    """For each placeholder of a parameter or buffer, its name."""
    constants: Mapping[str, Tensor]
    """For each placeholder of a constant, its value."""


@dataclass(frozen=True)
class Symmetries:
    """All groups of units that can be permuted in a network; `Symmetries(())` keeps every unit in place."""

    groups: tuple[UnitGroup, ...]
    """Blocks and single units first, then units inside blocks."""
    graph: ExportedGraph | None = field(default=None, repr=False)
    """The graph from which they were derived; None when they were written by hand."""

    def __str__(self) -> str:
        return "\n".join(
            f"{group.name}: {group.size} units in {', '.join(str(axis) for axis in group.axes)}"
            for group in self.groups
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[UnitGroup]:
        return iter(self.groups)

    def __getitem__(self, name: str) -> UnitGroup:
        for group in self.groups:
            if group.name == name:
                return group
        raise PapaError(f"no group '{name}': {did_you_mean(name, [group.name for group in self.groups])}")


@torch.no_grad()
def permute_all_(
    model: nn.Module,
    symmetries: Symmetries,
    permutations: Mapping[str, Permutation],
    *,
    optimizer: Optimizer | None = None,
) -> None:
    """Reorder units: unit `i` of a group becomes what unit `permutation[i]` was.

    Permutations are given by the group's name, and applied in this order. The network's tensors keep their memory; it
    is unchanged if an error is raised. The optimizer's state of the same shape as a parameter (such as momentum) is
    reordered with the parameter, so that training continues as it would have.

    Example:
        >>> from papa.align import symmetries
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> inputs = torch.randn(5, 4)
        >>> before = net(inputs)
        >>> permute_all_(net, symmetries(net, inputs), {"0.weight": [2, 0, 1]})
        >>> torch.allclose(net(inputs), before, atol=1e-6)
        True
    """
    tensors = named_tensors(model)
    state = optimizer.state if optimizer is not None else {}
    moves: dict[str, list[tuple[TensorAxis, Tensor]]] = {}
    for name, permutation in permutations.items():
        group = symmetries[name]
        order = _checked(permutation, group)
        for axis in group.axes:
            require_tensor(tensors, axis)
            moves.setdefault(axis.tensor, []).append((axis, order))
    for name, its_moves in moves.items():
        tensor = tensors[name]
        moments = [part for part in state.get(tensor, {}).values() if isinstance(part, Tensor)]
        for part in (tensor, *(part for part in moments if part.shape == tensor.shape)):
            values = part.detach().clone()
            for axis, order in its_moves:
                permute_axis_(values, axis, order)
            part.copy_(values)


def permute_axis_(tensor: Tensor, axis: TensorAxis, permutation: Tensor) -> None:
    """Reorder the units along one axis of one tensor."""
    part = axis.view(tensor)
    source, target = axis.index[permutation].flatten(), axis.index.flatten()
    part.index_copy_(axis.dim, target.to(part.device), part.index_select(axis.dim, source.to(part.device)))


def require_tensor(tensors: Mapping[str, Tensor], axis: TensorAxis) -> None:
    """Raise a `MemberError` if a network does not have the tensor and dimension of an axis."""
    tensor = tensors.get(axis.tensor)
    if tensor is None:
        raise MemberError(f"the network has no '{axis.tensor}': these symmetries belong to another architecture")
    last = int(axis.index.max())
    if last >= (tensor.shape[axis.dim] if axis.dim < tensor.dim() else 0):
        raise MemberError(
            f"the network has '{axis.tensor}' of shape {tuple(tensor.shape)}, expected more than {last} along dim "
            f"{axis.dim}: these symmetries belong to another architecture"
        )


def _checked(permutation: Permutation, group: UnitGroup) -> Tensor:
    order = torch.as_tensor(permutation, device="cpu")
    if (
        order.is_floating_point()
        or order.shape != (group.size,)
        or not torch.equal(order.sort().values.long(), torch.arange(group.size, device="cpu"))
    ):
        raise PapaError(
            f"group '{group.name}' was given {reprlib.repr(order.tolist())}, expected each of 0 to {group.size - 1} "
            "exactly once"
        )
    return order.long()


def inverse(permutation: Permutation) -> Tensor:
    """The permutation that undoes another.

    Example:
        >>> inverse([2, 0, 1])
        tensor([1, 2, 0])
    """
    return torch.argsort(torch.as_tensor(permutation, device="cpu"))


def inverses(permutations: dict[str, Tensor]) -> dict[str, Tensor]:
    """The permutations that undo those of several groups, for `permute_all_`: the inverse of each, the last first."""
    return {name: inverse(order) for name, order in reversed(permutations.items())}
