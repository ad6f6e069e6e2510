"""Permuting a network's units in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa import layout
from papa.align.groups import Group, Slot, Symmetries
from papa.errors import MemberError, PapaError

Permutation = Tensor | Sequence[int]


def permute_(model: nn.Module, group: Group, permutation: Permutation) -> None:
    """Reorder the units of one group: unit `i` becomes what unit `permutation[i]` was.

    Example:
        >>> from papa.align import symmetries
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> inputs = torch.randn(5, 4)
        >>> before = net(inputs)
        >>> (group,) = symmetries(net, inputs)
        >>> permute_(net, group, [2, 0, 1])
        >>> torch.allclose(net(inputs), before, atol=1e-6)
        True

    Args:
        model: the network; its tensors keep their memory. Left untouched when anything is wrong.
        group: one of its groups.
        permutation: each of `0 .. group.size - 1` once.
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

    Args:
        model: the network; left untouched when anything is wrong.
        symmetries: what can be permuted in it.
        permutations: one for each group to reorder, by the group's name.
        optimizer: whose state for the network's parameters is reordered with them where it has their shape (momentum
            and the like), so that training goes on as it would have.
    """
    tensors = {name: tensor for name, _, _, _, tensor in layout.tensors_of(model)}
    state = optimizer.state if optimizer is not None else {}
    moves: dict[str, list[tuple[Slot, Tensor]]] = {}
    for name, permutation in permutations.items():
        group = symmetries[name]
        order = checked(permutation, group)
        for slot in group.slots:
            found_tensor(tensors, slot)
            moves.setdefault(slot.tensor, []).append((slot, order))
    for name, its_moves in moves.items():
        tensor = tensors[name]
        kept = state.get(tensor, {}).values()
        for part in (tensor, *(part for part in kept if isinstance(part, Tensor) and part.shape == tensor.shape)):
            values = part.detach().clone()
            for slot, order in its_moves:
                permute_slot_(values, slot, order)
            part.copy_(values)


def permute_slot_(tensor: Tensor, slot: Slot, order: Tensor) -> None:
    """Reorder one tensor along one slot."""
    part = tensor if slot.within is None else tensor[slot.within[0] : slot.within[1]]
    source, target = slot.index[order].flatten(), slot.index.flatten()
    part.index_copy_(slot.axis, target.to(part.device), part.index_select(slot.axis, source.to(part.device)))


def found_tensor(tensors: Mapping[str, Tensor], slot: Slot) -> Tensor:
    """The tensor a slot is about, or an error when the network is not the one that the symmetries are of."""
    tensor = tensors.get(slot.tensor)
    if tensor is None:
        raise MemberError(f"the network has no '{slot.tensor}': these symmetries belong to another architecture")
    size = tensor.shape[slot.axis] if slot.axis < tensor.dim() else 0
    last = int(slot.index.max())
    if last >= size:
        raise MemberError(
            f"the network has '{slot.tensor}' of shape {tuple(tensor.shape)}, expected more than {last} along axis "
            f"{slot.axis}: these symmetries belong to another architecture"
        )
    return tensor


def checked(permutation: Permutation, group: Group) -> Tensor:
    """The permutation as a tensor, or an error when it is none."""
    order = torch.as_tensor(permutation, device="cpu")
    if (
        order.is_floating_point()
        or order.shape != (group.size,)
        or not torch.equal(order.sort().values.long(), torch.arange(group.size))
    ):
        raise PapaError(
            f"group '{group.name}' was given {_short(order)}, expected each of 0 to {group.size - 1} exactly once"
        )
    return order.long()


def inverse(permutation: Permutation) -> Tensor:
    """The permutation that undoes this one.

    Example:
        >>> inverse([2, 0, 1])
        tensor([1, 2, 0])
    """
    return torch.argsort(torch.as_tensor(permutation))


def undoing(permutations: dict[str, Tensor]) -> dict[str, Tensor]:
    """What undoes the permutations of several groups, for `permute_all_`: each group's inverse, the last first."""
    return {name: inverse(order) for name, order in reversed(permutations.items())}


def _short(order: Tensor) -> str:
    values = order.flatten().tolist()
    return str(values) if len(values) <= 8 else f"{str(values[:8])[:-1]}, ...] ({len(values)} numbers)"
