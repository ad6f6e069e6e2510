"""Binding modules to the rows of a matrix.

A `Layout` says at which columns each tensor of a network lives; a `BoundMember` keeps one module's tensors inside one
row. Tensors are bound by *aliased storage*: each gets a storage of its own over its slice of the row, so that copying,
pickling or saving a member takes that member alone and never the whole matrix.
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


@dataclass(frozen=True)
class Place:
    """One attribute of one module that holds a tensor; tied tensors have several places."""

    slot_name: str
    registry: dict[str, Tensor | None]
    key: str
    tensor: Tensor


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
    """Parameters always; buffers when persistent, of floating point, finite and not the frame of a constraint.

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
        and bool(torch.isfinite(tensor).all())
    )


def plan(models: list[nn.Module], average: Mapping[str, bool]) -> Layout:
    """The layout all the models share, or a `MemberError` that names the first member that differs, and where.

    Args:
        models: the members held here.
        average: glob patterns over tensor names; True or False decides for what matches, the last match wins.
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


class BoundMember:
    """One module whose tensors live in one row, and the means to notice when they no longer do."""

    def __init__(self, model: nn.Module, layout: Layout, rows: Mapping[torch.dtype, Tensor], member: int) -> None:
        self._member = member
        self._places = _places(model, {slot.name for slot in layout.slots})
        first = {place.slot_name: place.tensor for place in reversed(self._places)}
        self.tensors = [first[slot.name] for slot in layout.slots]
        # Shards cannot be rebound: what shards them holds their memory. They are copied in and out.
        self._shards = [number for number, tensor in enumerate(self.tensors) if is_sharded(tensor)]
        self._homes = [alias(rows[slot.dtype], slot) for slot in layout.slots]
        index = {slot.name: number for number, slot in enumerate(layout.slots)}
        self._checks = [(place, index[place.slot_name]) for place in self._places]
        self._pointers = [home.data_ptr() for home in self._homes]
        self._strides = [home.stride() for home in self._homes]
        self._modules = [
            (parent._modules, key, child) for parent in model.modules() for key, child in parent._modules.items()
        ]
        self._all_modules = list(model.modules())
        self._num_parts = self._count_parts()
        for number in range(len(self._homes)):
            self._bring_home(number)

    def _count_parts(self) -> int:
        return sum(len(module._parameters) + len(module._modules) for module in self._all_modules)

    def new_strides(self) -> dict[int, tuple[int, ...]]:
        """The strides of those tensors that were moved out into another memory order, by their number."""
        found = {}
        for number, (tensor, home) in enumerate(zip(self.tensors, self._homes, strict=True)):
            if is_sharded(tensor):
                continue
            is_moved = tensor.data_ptr() != self._pointers[number] and tensor.stride() != self._strides[number]
            if is_moved and (tensor.shape, tensor.dtype, tensor.device) == (home.shape, home.dtype, home.device):
                found[number] = tensor.stride()
        return found

    def _bring_home(self, number: int) -> None:
        tensor, home = self.tensors[number], self._homes[number]
        home.copy_(here(tensor).detach().clone())  # it may overlap its home, as a transposed view does
        if not is_sharded(tensor):
            tensor.data = home

    @torch.no_grad()
    def write_back_(self) -> None:
        """Bring what was written to the row to the tensors that do not live there: shards."""
        for number in self._shards:
            here(self.tensors[number]).copy_(self._homes[number])

    @property
    def is_sharded(self) -> bool:
        """Whether parameters of the member are shards."""
        return bool(self._shards)

    def refresh_(self) -> None:
        """Bring tensors that were moved out back into the row; raise where that would hide a mistake."""
        for registry, key, module in self._modules:
            if registry.get(key) is not module:
                raise MemberError(
                    f"member {self._member} has another module as '{key}' than when it was bound, which is not in the "
                    "matrix: rebuild population and optimizers after changing a member's layers"
                )
        pointers, strides = self._pointers, self._strides
        for place, number in self._checks:
            current = place.registry.get(place.key)
            tensor = self.tensors[number]
            if current is tensor and is_sharded(tensor):
                self._bring_home(number)
                continue
            is_home = tensor.data_ptr() == pointers[number] and tensor.stride() == strides[number]
            if current is tensor and is_home:
                continue
            self._check_can_come_home(place, number, current)
            assert current is not None
            if current is tensor:
                self._bring_home(number)
            else:  # the new tensor is somebody else's: its values move in, it does not
                self._homes[number].copy_(current.detach())
                place.registry[place.key] = tensor
        if self._count_parts() != self._num_parts:
            raise MemberError(
                f"member {self._member} has gained parameters or layers since it was bound: rebuild population "
                "and optimizers after changing a member's layers"
            )

    def _check_can_come_home(self, place: Place, number: int, current: Tensor | None) -> None:
        subject, home = f"member {self._member} has '{place.slot_name}'", self._homes[number]
        if current is None:
            raise MemberError(f"member {self._member} no longer has '{place.slot_name}': rebuild the population")
        if isinstance(current, nn.Parameter) and current is not self.tensors[number]:
            raise MemberError(
                f"{subject} as a new Parameter, while its optimizer still trains the old one: load weights with "
                "load_state_dict(assign=False), or rebuild population and optimizers"
            )
        if current.dtype != home.dtype or current.shape != home.shape:
            raise MemberError(
                f"{subject} of {current.dtype} and shape {tuple(current.shape)}, expected {home.dtype} and "
                f"{tuple(home.shape)}: convert all members at once with population.to(...)"
            )
        if current.device != home.device:
            raise MemberError(
                f"{subject} on {current.device}, expected {home.device}: move all members at once with "
                "population.to(...)"
            )


def _places(model: nn.Module, names: set[str]) -> list[Place]:
    name_of: dict[int, str] = {}
    places = []
    for name, is_parameter, owner, key, tensor in tensors_of(model):
        slot_name = name_of.setdefault(id(tensor), name)
        if slot_name in names:
            registry: dict[str, Tensor | None] = owner._parameters if is_parameter else owner._buffers  # type: ignore[assignment]
            places.append(Place(slot_name, registry, key, tensor))
    return places
