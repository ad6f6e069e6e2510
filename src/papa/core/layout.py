"""The layout of a population's matrix: which tensors of a network are averaged, and which columns hold them.

A population is a matrix `W` with one row per member: row `j` holds all averaged numbers of member `j`, one after the
other, so that averaging members is one product `W <- A W`. A `Layout` assigns each averaged tensor its columns, its
`Slot`. All members share one layout; there is one matrix per dtype.

A member's tensor does not view the matrix, which would tie every saved or copied member to the whole matrix. It gets a
storage that covers only its own columns (see `alias`); `papa.core.binding` puts it there.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from papa.errors import MemberError, PapaError, PapaWarning

ALIGNMENT_BYTES = 64
"""Every tensor starts on a cache line, as torch's own allocations do."""


@dataclass(frozen=True)
class Slot:
    """The columns of one tensor, starting at `offset`, and how to view them as that tensor."""

    name: str
    is_parameter: bool
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """The number of columns."""
        return self.shape.numel()


@dataclass(frozen=True)
class Layout:
    """The slots of all averaged tensors: one matrix per dtype, in which parameters come before buffers."""

    slots: tuple[Slot, ...]
    num_columns: Mapping[torch.dtype, int]
    num_parameter_columns: Mapping[torch.dtype, int]
    device: torch.device

    @functools.cached_property
    def spans(self) -> Tensor:
        """The first column of each slot and the number of its columns, `(2, slots)` in float64."""
        return torch.tensor([(slot.offset, slot.numel) for slot in self.slots], dtype=torch.float64, device="cpu").T

    @functools.cached_property
    def buffer_columns(self) -> dict[torch.dtype, slice]:
        """By dtype, the columns of averaged buffers, which come after those of parameters; not their padding."""
        starts = self.num_parameter_columns
        ends = {dtype: max(slot.offset + slot.numel for slot in self.slots if slot.dtype == dtype) for dtype in starts}
        return {dtype: slice(start, ends[dtype]) for dtype, start in starts.items() if start < ends[dtype]}

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """The memory order of each averaged tensor in its row."""
        return tuple(slot.stride for slot in self.slots)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype with the most columns."""
        return max(self.num_columns, key=lambda dtype: self.num_columns[dtype])


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files."""
    return str(dtype).removeprefix("torch.")


def describe(slot: Slot) -> str:
    """What members must have in common: dtype, shape and, if unusual, the strides."""
    usual = torch.empty(slot.shape, device="meta").stride()
    order = "" if slot.stride == usual else f" with strides {slot.stride}"
    return f"{slot.dtype} of shape {tuple(slot.shape)}{order}"


def tensors_of(model: nn.Module) -> Iterator[tuple[str, bool, nn.Module, str, Tensor]]:
    """All parameters and buffers as (name, is parameter, owning module, attribute, tensor); tied ones repeat."""
    for prefix, module in model.named_modules():
        for is_parameter, registry in ((True, module._parameters), (False, module._buffers)):
            for key, tensor in registry.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, is_parameter, module, key, tensor


def named_tensors(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The parameters and buffers with these names, in this order; all of them when None."""
    tensors = {name: tensor for name, _, _, _, tensor in tensors_of(model)}
    return tensors if names is None else {name: tensors[name] for name in names}


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a shard of the tensor (a `DTensor`, made by `fully_shard`)."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor on this process: its shard under `fully_shard`, otherwise the tensor."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def reshard_(model: nn.Module) -> None:
    """Shard the parameters that a forward pass under `fully_shard` left unsharded."""
    for module in filter(can_reshard, model.modules()):
        module.reshard()  # type: ignore[operator]


def can_reshard(module: nn.Module) -> bool:
    """Whether a module is managed by `fully_shard`."""
    return callable(getattr(module, "reshard", None)) and hasattr(module, "unshard")


def is_averageable(tensor: Tensor) -> bool:
    """Whether the dtype has a mean: floating-point and complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_averaged_by_default(owner: nn.Module, key: str, is_parameter: bool, tensor: Tensor) -> bool:
    """Whether a tensor is averaged: all parameters, and buffers that are persistent, finite and have a useful mean.

    Masks, recognised by their names (those of `torch.nn.utils.prune`, for instance), have none. Running statistics of
    normalisation layers are averaged even if non-finite: one diverged member must not exclude those of the others.
    """
    if not is_averageable(tensor):
        return False
    if is_parameter or isinstance(owner, _NormBase) or tensor.layout is not torch.strided:
        return True  # a sparse tensor is refused later
    return (
        tensor.numel() > 0  # the first forward pass may resize an empty buffer
        and key not in owner._non_persistent_buffers_set
        and key not in _constraint_buffers(owner)
        and not (key == "mask" or key.endswith("_mask"))
        and bool(torch.isfinite(tensor).all())
    )


def _constraint_buffers(module: nn.Module) -> set[str]:
    """Buffers of weight constraints, which have no useful mean: spectral-norm vectors, the base of an orthogonal
    parametrization."""
    if type(module).__name__ == "_SpectralNorm":
        return {"_u", "_v"}
    if type(module).__name__ == "_Orthogonal":
        return {"base"}
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == "SpectralNorm"]
    return {f"{hook.name}{end}" for hook in hooks for end in ("_u", "_v")}  # type: ignore[attr-defined]


def plan(models: list[nn.Module], average: Mapping[str, bool], *, apart: bool = True) -> Layout:
    """The layout that all models share.

    `average` maps glob patterns over tensor names to whether matching tensors are averaged; the last match wins. With
    `apart`, two models that share a tensor are an error.

    Raises:
        MemberError: names the first member that differs from the others, and the tensor.
    """
    found = [_slots_of(model, average, member) for member, model in enumerate(models)]
    for member in range(1, len(models)):
        # Tensors that are not averaged only need the same names.
        pairs = {name: (found[0][name], own) for name, own in found[member].items() if name in found[0]}
        free = {name for name, pair in pairs.items() if not any(is_averaged for _, is_averaged in pair)}
        check_same_tensors(
            {name: found[0][name][0] if name in free else slot for name, (slot, _) in found[member].items()},
            {name: slot for name, (slot, _) in found[0].items()},
            subject=f"member {member}",
            reference="member 0",
            remedy="all members of a population must share one architecture",
        )
    names = list(named_tensors(models[0]))
    for pattern in average:
        if not fnmatch.filter(names, pattern):
            raise MemberError(f"`average` has the pattern '{pattern}', which matches no parameter or buffer")
    # A buffer is averaged only if the values of every member allow it.
    averaged = [slot for name, (slot, _) in found[0].items() if all(slots[name][1] for slots in found)]
    if apart:
        _check_apart(models, {slot.name for slot in averaged})
    _warn_of_different_bases(models)
    if not averaged:
        raise MemberError("members have no floating-point tensor: there is nothing to average")
    return _arrange(averaged, _device_of(models, [slot.name for slot in averaged]))


def _slots_of(model: nn.Module, average: Mapping[str, bool], member: int) -> dict[str, tuple[Slot, bool]]:
    """A slot for each tensor, under its first name, and whether it is averaged."""
    slots: dict[str, tuple[Slot, bool]] = {}
    names_of: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model).items():
        names_of.setdefault(id(tensor), []).append(name)
    name_at: dict[int, str] = {}
    for name, is_parameter, owner, key, tensor in tensors_of(model):
        if name != names_of[id(tensor)][0]:
            continue
        wanted = [
            is_wanted
            for pattern, is_wanted in average.items()
            if any(fnmatch.fnmatchcase(other, pattern) for other in names_of[id(tensor)])
        ]
        is_averaged = wanted[-1] if wanted else _is_averaged_by_default(owner, key, is_parameter, tensor)
        if not is_averaged:  # may be of any kind, such as a quantised subclass
            slots[name] = (Slot(name, is_parameter, tensor.dtype, tensor.shape, ()), False)
            continue
        local = local_part(tensor)
        _check_bindable(name, local, member)
        if local.numel() and name_at.setdefault(local.data_ptr(), name) != name:
            raise MemberError(
                f"member {member} has '{name}' in the memory of '{name_at[local.data_ptr()]}', but as another tensor: "
                "tie them by assigning one and the same Parameter"
            )
        if not is_averageable(tensor):
            raise MemberError(f"'{name}' is {tensor.dtype} and cannot be averaged: leave it out of `average`")
        stride = torch.empty_like(local, device="meta").stride()
        slots[name] = (Slot(name, is_parameter, local.dtype, local.shape, stride), True)
    return slots


def _check_bindable(name: str, tensor: Tensor, member: int) -> None:
    subject = f"member {member} has '{name}'"
    if isinstance(tensor, UninitializedTensorMixin):
        raise MemberError(f"{subject} uninitialised: run one forward pass through it first")
    if type(tensor.detach()) is not Tensor or tensor.layout is not torch.strided:
        kind = type(tensor.detach()).__name__ if tensor.layout is torch.strided else str(tensor.layout)
        raise MemberError(f"{subject} as {kind}, expected a plain dense tensor: leave it out with `average`")
    if tensor.is_meta:
        raise MemberError(f"{subject} on the meta device: give it values first")
    if tensor.is_inference():
        raise MemberError(f"{subject} made under inference_mode: build members outside of it")


def check_same_tensors(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    subject: str,
    reference: str,
    remedy: str,
    error: type[PapaError] = MemberError,
    same_dtypes: bool = True,
) -> None:
    """Raise unless two networks have tensors of the same names and shapes; `subject` and `reference` are for the error.

    Dtypes must be the same, or else both or neither must have a mean. Values have a `shape` and a `dtype`.
    """
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        listed = [f"no '{name}'" for name in missing] + [f"an extra '{name}'" for name in extra]
        raise error(f"{subject} has {', '.join(listed[:10])}, compared with {reference}: {remedy}")
    for name, own in expected.items():
        other = found[name]
        if tuple(other.shape) != tuple(own.shape):
            shapes = f"of shape {tuple(other.shape)}, {reference} has {tuple(own.shape)}"
            raise error(f"{subject} has '{name}' {shapes}: {remedy}")
        kinds = [
            one.dtype if same_dtypes else (one.dtype.is_floating_point or one.dtype.is_complex) for one in (other, own)
        ]
        if kinds[0] != kinds[1]:
            raise error(f"{subject} has '{name}' as {other.dtype}, {reference} as {own.dtype}: {remedy}")


def _check_apart(models: list[nn.Module], names: set[str]) -> None:
    owner_of: dict[int, int] = {}
    for member, model in enumerate(models):
        for name, tensor in named_tensors(model).items():
            owner = owner_of.setdefault(id(tensor), member) if name in names else member
            if owner != member:
                raise MemberError(
                    f"member {member} shares '{name}' with member {owner}: give each its own (copy.deepcopy), or leave "
                    "it out with `average`"
                )


def _warn_of_different_bases(models: Sequence[nn.Module]) -> None:
    """Orthogonal weights are trained relative to a base, so only those with the same base have a mean."""
    bases = [
        [base for _, _, owner, key, base in tensors_of(model) if key == "base" and key in _constraint_buffers(owner)]
        for model in models
    ]
    if any(not torch.equal(own, first) for other in bases[1:] for own, first in zip(other, bases[0], strict=True)):
        warnings.warn(
            "members have orthogonal parametrizations with different bases, which have no useful average: start "
            "members from the same weights, or use orthogonal(..., use_trivialization=False)",
            PapaWarning,
            stacklevel=5,
        )


def _device_of(models: list[nn.Module], names: Collection[str]) -> torch.device:
    """The device of all averaged tensors; others may be elsewhere, such as an offloaded frozen base."""
    device: torch.device | None = None
    for member, model in enumerate(models):
        for name, tensor in named_tensors(model, names).items():
            device = device or tensor.device
            if tensor.device != device:
                raise MemberError(
                    f"member {member} has '{name}' on {tensor.device}, others are on {device}: move all averaged "
                    "tensors to one device first, or leave some out with `average`"
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
        # With an odd number of cache lines per row, the same column of different rows falls into different cache sets.
        step = ALIGNMENT_BYTES // dtype.itemsize
        ends[dtype] += step * (ends[dtype] // step % 2 == 0)
    return Layout(tuple(placed), ends, {dtype: parameter_ends.get(dtype, 0) for dtype in ends}, device)


def alias(row: Tensor, slot: Slot) -> Tensor:
    """The slot's columns of a row as a tensor over the same memory, with a storage that covers these columns only."""
    start = (row.storage_offset() + slot.offset) * row.element_size()
    storage = row.untyped_storage()[start : start + slot.numel * row.element_size()]
    return torch.empty(0, dtype=row.dtype, device=row.device).set_(storage, 0, slot.shape, slot.stride)


def copy_onto(model: nn.Module, layout: Layout, rows: Mapping[torch.dtype, Tensor]) -> nn.Module:
    """A copy of a module with its averaged tensors in the given row per dtype, and with the values of these rows."""
    slots = {slot.name: slot for slot in layout.slots}
    copies: dict[int, Any] = {}
    for name, tensor in named_tensors(model).items():
        slot = slots.get(name)
        if slot is None or id(tensor) in copies:
            continue
        in_row = alias(rows[slot.dtype], slot)
        if type(tensor) is nn.Parameter:
            copies[id(tensor)] = nn.Parameter(in_row, tensor.requires_grad)
        elif type(tensor) is Tensor:
            copies[id(tensor)] = in_row
        else:  # a subclass with its own way of being copied
            copies[id(tensor)] = copy.deepcopy(tensor)
            copies[id(tensor)].data = in_row
    return copy.deepcopy(model, copies)


def stacked(rows: Tensor, slot: Slot) -> Tensor:
    """The slot's columns of several rows as one tensor `(rows, *shape)`, a view."""
    offset = rows.storage_offset() + slot.offset
    return rows.as_strided((len(rows), *slot.shape), (rows.stride(0), *slot.stride), offset)
