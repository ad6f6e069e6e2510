"""Permuting a network's units in place."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.align.unit_groups import Symmetries, TensorAxis, UnitGroup
from papa.core import layout
from papa.errors import MemberError, PapaError

Permutation = Tensor | Sequence[int]
Permutations = dict[str, Tensor]
"""A permutation for each group, by name: blocks and single units first, then units inside blocks."""


def permute_(model: nn.Module, group: UnitGroup, permutation: Permutation) -> None:
    """Reorder the units of one group: unit `i` becomes what unit `permutation[i]` was.

    The network's tensors keep their memory, and it is unchanged if an error is raised.

    Example:
        >>> from papa.align import symmetries
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> inputs = torch.randn(5, 4)
        >>> before = net(inputs)
        >>> (group,) = symmetries(net, inputs)
        >>> permute_(net, group, [2, 0, 1])
        >>> torch.allclose(net(inputs), before, atol=1e-6)
        True
    """
    permute_all_(model, Symmetries((group,)), {group.name: permutation})


@torch.no_grad()
def permute_all_(
    model: nn.Module,
    symmetries: Symmetries,
    permutations: Mapping[str, Permutation],
    *,
    optimizer: Optimizer | None = None,
) -> None:
    """Reorder the units of several groups, one after the other in the order of `permutations`; see `permute_`.

    Permutations are given by the group's name. The optimizer's state of the same shape as a parameter (such as
    momentum) is reordered with the parameter, so that training continues as it would have.
    """
    tensors = tensors_by_name(model)
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


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a network."""
    return {name: tensor for name, _, _, _, tensor in layout.tensors_of(model)}


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
        or not torch.equal(order.sort().values.long(), torch.arange(group.size))
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
    return torch.argsort(torch.as_tensor(permutation))


def inverses(permutations: dict[str, Tensor]) -> dict[str, Tensor]:
    """The permutations that undo those of several groups, for `permute_all_`: the inverse of each, the last first."""
    return {name: inverse(order) for name, order in reversed(permutations.items())}
