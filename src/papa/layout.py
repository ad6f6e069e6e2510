"""A network as a row: which of its tensors are averaged, and at which columns each lives.

Tensors are put into rows by *aliased storage* (`alias`): each gets a storage of its own over its slice of the row, so
that copying, pickling or saving a member takes that member alone and never the whole matrix. `papa.binding` does so.
"""

from __future__ import annotations

import copy
import fnmatch
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from papa.errors import MemberError

ALIGNMENT_BYTES = 64
"""Every tensor starts on a cache line, as torch's own allocations do."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a network lives: its columns, and how it looks from the module's side."""

    name: str
    is_parameter: bool
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """How many columns the tensor takes."""
        return self.shape.numel()


@dataclass(frozen=True)
class Layout:
    """The columns of a network: parameters first, then buffers, one block of columns per dtype."""

    slots: tuple[Slot, ...]
    num_columns: Mapping[torch.dtype, int]
    num_parameter_columns: Mapping[torch.dtype, int]
    device: torch.device

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype that most numbers of the network have."""
        return max(self.num_columns, key=lambda dtype: self.num_columns[dtype])


def described(slot: Slot) -> str:
    """What must be the same of a tensor wherever members are averaged; its memory order only where it is unusual."""
    usual = torch.empty(slot.shape, device="meta").stride()
    order = "" if slot.stride == usual else f" with strides {slot.stride}"
    return f"{slot.dtype} of shape {tuple(slot.shape)}{order}"


def tensors_of(model: nn.Module) -> Iterator[tuple[str, bool, nn.Module, str, Tensor]]:
    """Every place of a module tree that holds a tensor: name, whether a parameter, owner, key, tensor."""
    for prefix, module in model.named_modules():
        for is_parameter, registry in ((True, module._parameters), (False, module._buffers)):
            for key, tensor in registry.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, is_parameter, module, key, tensor


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless `fully_shard` spread it over several."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a shard of the tensor (a `DTensor`, as `fully_shard` makes)."""
    return hasattr(tensor, "to_local")


def reshard_(model: nn.Module) -> None:
    """Bring modules under `fully_shard` back to their shards, where a forward pass left them whole."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()


def frames_of(module: nn.Module) -> set[str]:
    """The names of buffers in which a constraint on weights is expressed, and whose average means nothing: the vectors
    of a spectral norm, the base of an orthogonal matrix."""
    if type(module).__name__ == "_SpectralNorm":
        return {"_u", "_v"}
    if type(module).__name__ == "_Orthogonal":
        return {"base"}
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == "SpectralNorm"]
    return {f"{hook.name}{end}" for hook in hooks for end in ("_u", "_v")}  # type: ignore[attr-defined]


def is_averaged_by_default(owner: nn.Module, key: str, is_parameter: bool, tensor: Tensor) -> bool:
    """Parameters always; buffers when persistent, of floating point, finite and neither a mask nor the frame of a
    constraint. Masks are known by their names, as those that `torch.nn.utils.prune` makes.

    Running statistics of normalisation layers are averaged whatever their values: a member that diverged must not
    take them away from the others.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if is_parameter or isinstance(owner, _NormBase):
        return True
    return (
        tensor.numel() > 0  # it may be resized by the first forward pass
        and key not in owner._non_persistent_buffers_set
        and key not in frames_of(owner)
        and not (key == "mask" or key.endswith("_mask"))
        and bool(torch.isfinite(tensor).all())
    )


def plan(models: list[nn.Module], average: Mapping[str, bool], *, apart: bool = True) -> Layout:
    """The layout all the models share, or a `MemberError` that names the first member that differs, and where.

    Args:
        models: the members held here.
        average: glob patterns over tensor names; True or False decides for what matches, the last match wins.
        apart: whether models that share a tensor are refused.
    """
    wanted = [_slots_of(model, average, member) for member, model in enumerate(models)]
    for member in range(1, len(models)):
        _check_same(wanted[0], wanted[member], member)
    _check_patterns(models[0], average)
    # A buffer stays out for everyone as soon as one member's values forbid averaging it.
    averaged = [
        slot
        for name, (slot, _) in wanted[0].items()
        if all(is_averaged for _, is_averaged in (slots[name] for slots in wanted))
    ]
    if apart:
        _check_apart(models, {slot.name for slot in averaged})
    _warn_of_bases(models)
    if not averaged:
        raise MemberError("members have no floating-point tensor: there is nothing to average")
    return _arrange(averaged, _device_of(models))


def _warn_of_bases(models: Sequence[nn.Module]) -> None:
    """Orthogonal matrices are trained relative to a base: between members, only those with one base have a mean."""
    bases = [_bases_of(model) for model in models]
    if any(not torch.equal(own, first) for other in bases[1:] for own, first in zip(other, bases[0], strict=True)):
        warnings.warn(
            "members have orthogonal parametrizations with different bases, whose average means nothing: start members "
            "from the same weights, or use orthogonal(..., use_trivialization=False)",
            stacklevel=5,
        )


def _bases_of(model: nn.Module) -> list[Tensor]:
    modules = [module for module in model.modules() if type(module).__name__ == "_Orthogonal"]
    return [base for module in modules for name, base in module.named_buffers(recurse=False) if name == "base"]


def _slots_of(model: nn.Module, average: Mapping[str, bool], member: int) -> dict[str, tuple[Slot, bool]]:
    slots: dict[str, tuple[Slot, bool]] = {}
    names_of: dict[int, list[str]] = {}
    for name, _, _, _, tensor in tensors_of(model):
        names_of.setdefault(id(tensor), []).append(name)
    name_at: dict[int, str] = {}
    for name, is_parameter, owner, key, tensor in tensors_of(model):
        if name != names_of[id(tensor)][0]:
            continue
        local = here(tensor)
        _check_bindable(name, local, member)
        if local.numel() and name_at.setdefault(local.data_ptr(), name) != name:
            raise MemberError(
                f"member {member} has '{name}' in the memory of '{name_at[local.data_ptr()]}', but as another tensor: "
                "tie them by assigning one and the same Parameter"
            )
        is_averaged = is_averaged_by_default(owner, key, is_parameter, tensor)
        for pattern, verdict in average.items():
            if any(fnmatch.fnmatchcase(other, pattern) for other in names_of[id(tensor)]):
                is_averaged = verdict
        if is_averaged and not (tensor.is_floating_point() or tensor.is_complex()):
            raise MemberError(f"'{name}' is {tensor.dtype} and cannot be averaged: leave it out of `average`")
        stride = torch.empty_like(local, device="meta").stride()
        slots[name] = (Slot(name, is_parameter, local.dtype, local.shape, stride), is_averaged)
    return slots


def _check_bindable(name: str, tensor: Tensor, member: int) -> None:
    if isinstance(tensor, UninitializedTensorMixin):
        raise MemberError(f"member {member} has '{name}' uninitialised: run one forward pass through it first")
    if type(tensor.detach()) is not Tensor or tensor.layout is not torch.strided:
        kind = type(tensor.detach()).__name__ if tensor.layout is torch.strided else str(tensor.layout)
        raise MemberError(f"member {member} has '{name}' as {kind}, expected a plain dense tensor")
    if tensor.is_meta:
        raise MemberError(f"member {member} has '{name}' on the meta device: give it values first")
    if tensor.is_inference():
        raise MemberError(f"member {member} has '{name}' made under inference_mode: build members outside of it")


def _check_same(expected: dict[str, tuple[Slot, bool]], found: dict[str, tuple[Slot, bool]], member: int) -> None:
    cure = "all members of a population must share one architecture"
    for name in sorted(expected.keys() - found.keys()):
        raise MemberError(f"member {member} has no '{name}', member 0 has: {cure}")
    for name in sorted(found.keys() - expected.keys()):
        raise MemberError(f"member {member} has '{name}', member 0 has not: {cure}")
    for name, (slot, is_averaged) in expected.items():
        other, is_other_averaged = found[name]
        if not (is_averaged or is_other_averaged):
            continue
        if other.shape != slot.shape:
            found_shape, expected_shape = tuple(other.shape), tuple(slot.shape)
            raise MemberError(
                f"member {member} has '{name}' of shape {found_shape}, member 0 has {expected_shape}: {cure}"
            )
        if other.dtype != slot.dtype:
            raise MemberError(f"member {member} has '{name}' as {other.dtype}, member 0 as {slot.dtype}: {cure}")


def _check_apart(models: list[nn.Module], names: set[str]) -> None:
    owner_of: dict[int, int] = {}
    for member, model in enumerate(models):
        for name, _, _, _, tensor in tensors_of(model):
            owner = owner_of.setdefault(id(tensor), member) if name in names else member
            if owner != member:
                raise MemberError(
                    f"member {member} shares '{name}' with member {owner}: give each its own (copy.deepcopy), or leave "
                    "it out with `average`"
                )


def _check_patterns(model: nn.Module, average: Mapping[str, bool]) -> None:
    names = [name for name, *_ in tensors_of(model)]
    for pattern in average:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise MemberError(f"`average` has the pattern '{pattern}', which matches no parameter or buffer")


def _device_of(models: list[nn.Module]) -> torch.device:
    device: torch.device | None = None
    for member, model in enumerate(models):
        for name, _, _, _, tensor in tensors_of(model):
            device = device or tensor.device
            if tensor.device != device:
                raise MemberError(
                    f"member {member} has '{name}' on {tensor.device}, member 0 is on {device}: "
                    "move all members to one device first"
                )
    assert device is not None
    return device


def _arrange(slots: list[Slot], device: torch.device) -> Layout:
    ends: dict[torch.dtype, int] = {}
    parameter_ends: dict[torch.dtype, int] = {}
    placed: list[Slot] = []
    for slot in sorted(slots, key=lambda slot: not slot.is_parameter):
        step = ALIGNMENT_BYTES // slot.dtype.itemsize
        offset = ends.get(slot.dtype, 0)
        placed.append(replace(slot, offset=offset))
        ends[slot.dtype] = offset + -(-slot.numel // step) * step
        if slot.is_parameter:
            parameter_ends[slot.dtype] = ends[slot.dtype]
    for dtype in ends:
        # An odd number of cache lines: equal columns of different rows then fall into different cache sets.
        step = ALIGNMENT_BYTES // dtype.itemsize
        ends[dtype] += step * (ends[dtype] // step % 2 == 0)
    return Layout(tuple(placed), ends, {dtype: parameter_ends.get(dtype, 0) for dtype in ends}, device)


def named_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters and buffers of a module that have these names, in their order."""
    tensors = {name: tensor for name, _, _, _, tensor in tensors_of(model)}
    return {name: tensors[name] for name in names}


def alias(row: Tensor, slot: Slot) -> Tensor:
    """The slot's part of a row as a tensor with a storage of its own over the same memory."""
    start = (row.storage_offset() + slot.offset) * row.element_size()
    storage = row.untyped_storage()[start : start + slot.numel * row.element_size()]
    return torch.empty(0, dtype=row.dtype, device=row.device).set_(storage, 0, slot.shape, slot.stride)


def twin(model: nn.Module, layout: Layout, rows: Mapping[torch.dtype, Tensor]) -> nn.Module:
    """A copy of a module whose averaged tensors live in one row by dtype, and have the numbers that are there."""
    slots = {slot.name: slot for slot in layout.slots}
    copies: dict[int, Any] = {}
    for name, _, _, _, tensor in tensors_of(model):
        slot = slots.get(name)
        if slot is None or id(tensor) in copies:
            continue
        home = alias(rows[slot.dtype], slot)
        if type(tensor) is nn.Parameter:
            copies[id(tensor)] = nn.Parameter(home, tensor.requires_grad)
        elif type(tensor) is Tensor:
            copies[id(tensor)] = home
        else:  # a kind of its own knows how to be copied
            copies[id(tensor)] = copy.deepcopy(tensor)
            copies[id(tensor)].data = home
    return copy.deepcopy(model, copies)


def stacked(rows: Tensor, slot: Slot) -> Tensor:
    """The slot's part of several rows as one tensor, a view with the rows in front."""
    offset = rows.storage_offset() + slot.offset
    return rows.as_strided((len(rows), *slot.shape), (rows.stride(0), *slot.stride), offset)
