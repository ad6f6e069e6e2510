"""Binding: keeping the tensors of one member inside one row of the population's matrix.

A member stays an ordinary module, but the memory of its parameters and averaged buffers is its row of `W`. So the
optimizer writes to the matrix, and `W <- A W` changes the members without copies. Some operations replace a module's
tensors and so undo this (`module.to(memory_format=...)`, assigning a buffer); `BoundMember.refresh_` notices and
repairs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from papa.core.layout import Layout, alias, can_reshard, is_sharded, local_part, tensors_of
from papa.errors import MemberError


class _Attribute(NamedTuple):
    """A module attribute that refers to a bound tensor; tied tensors have several."""

    number: int
    """The index of the tensor in `BoundMember.tensors`."""
    name: str
    registry: dict[str, Tensor | None]
    """The `_parameters` or `_buffers` of the module."""
    key: str


class BoundMember:
    """One module with its averaged tensors in one row per dtype, into which they are moved; `member` is for errors."""

    def __init__(self, model: nn.Module, layout: Layout, rows: Mapping[torch.dtype, Tensor], member: int) -> None:
        self._member = member
        numbers = {slot.name: number for number, slot in enumerate(layout.slots)}
        first_names: dict[int, str] = {}
        self.attributes: list[_Attribute] = []
        found: dict[str, Tensor] = {}
        for name, is_parameter, owner, key, tensor in tensors_of(model):
            first_name = first_names.setdefault(id(tensor), name)
            if first_name in numbers:
                registry: dict[str, Tensor | None] = owner._parameters if is_parameter else owner._buffers  # type: ignore[assignment]
                self.attributes.append(_Attribute(numbers[first_name], first_name, registry, key))
                found[first_name] = tensor
        self.tensors = [found[slot.name] for slot in layout.slots]
        # Shards cannot be moved, as `fully_shard` manages their memory: their values are copied in and out instead.
        self._shards = {number for number, tensor in enumerate(self.tensors) if is_sharded(tensor)}
        self.whole_tensors = [tensor for tensor in self.tensors if not is_sharded(tensor)]
        """The tensors that live in the row."""
        self._in_row = [alias(rows[slot.dtype], slot) for slot in layout.slots]
        self.pointers = [tensor.data_ptr() for tensor in self._in_row]
        self.strides = [tensor.stride() for tensor in self._in_row]
        self._all_modules = list(model.modules())
        self.children = [
            (parent._modules, key, child) for parent in self._all_modules for key, child in parent._modules.items()
        ]
        self.registries = [registry for m in self._all_modules for registry in (m._parameters, m._modules)]
        self._num_parts = self._count_parts()
        self.sharded_modules = [module for module in self._all_modules if can_reshard(module)]
        for number in range(len(self._in_row)):
            self._move_into_row(number)

    def _count_parts(self) -> int:
        return sum(map(len, self.registries))

    def new_strides(self) -> dict[int, tuple[int, ...]]:
        """The strides, by index, of tensors that were replaced by ones that differ in their strides only."""
        found = {}
        for number, (tensor, in_row) in enumerate(zip(self.tensors, self._in_row, strict=True)):
            if number in self._shards:
                continue
            is_moved = tensor.data_ptr() != self.pointers[number] and tensor.stride() != self.strides[number]
            if is_moved and (tensor.shape, tensor.dtype, tensor.device) == (in_row.shape, in_row.dtype, in_row.device):
                found[number] = tensor.stride()
        return found

    def _move_into_row(self, number: int) -> None:
        tensor, in_row = self.tensors[number], self._in_row[number]
        in_row.copy_(local_part(tensor).detach().clone())  # cloned, as a transposed view overlaps its columns
        if not is_sharded(tensor):
            tensor.data = in_row

    @torch.no_grad()
    def write_back_(self) -> None:
        """Copy the values of the row to tensors that cannot live in it: shards."""
        for number in self._shards:
            local_part(self.tensors[number]).copy_(self._in_row[number])

    @property
    def is_sharded(self) -> bool:
        """Whether parameters of the member are shards."""
        return bool(self._shards)

    def refresh_(self) -> None:
        """Move tensors that left the row back into it.

        Raises:
            MemberError: the module changed in a way that moving tensors back would hide, such as a new Parameter.
        """
        for registry, key, module in self.children:
            if registry.get(key) is not module:
                raise MemberError(
                    f"member {self._member} has another module as '{key}' than when it was bound, which is not in the "
                    "matrix: rebuild population and optimizers after changing a member's layers"
                )
        pointers, strides = self.pointers, self.strides
        for attribute in self.attributes:
            number = attribute.number
            current, tensor = attribute.registry.get(attribute.key), self.tensors[number]
            if current is tensor and number in self._shards:
                self._move_into_row(number)
                continue
            is_in_row = tensor.data_ptr() == pointers[number] and tensor.stride() == strides[number]
            if current is tensor and is_in_row:
                continue
            current = self._checked(current, attribute)
            if current is tensor:
                self._move_into_row(number)
            else:  # the new tensor may be used elsewhere: copy its values and restore the bound tensor
                self._in_row[number].copy_(current.detach())
                attribute.registry[attribute.key] = tensor
        if self._count_parts() != self._num_parts:
            raise MemberError(
                f"member {self._member} has gained parameters or layers since it was bound: rebuild population "
                "and optimizers after changing a member's layers"
            )

    def _checked(self, current: Tensor | None, attribute: _Attribute) -> Tensor:
        """The current tensor of an attribute, if its values may be copied into the row."""
        subject, expected = f"member {self._member} has '{attribute.name}'", self._in_row[attribute.number]
        if current is None:
            raise MemberError(f"member {self._member} no longer has '{attribute.name}': rebuild the population")
        if isinstance(current, nn.Parameter) and current is not self.tensors[attribute.number]:
            raise MemberError(
                f"{subject} as a new Parameter, while its optimizer still trains the old one: load weights with "
                "load_state_dict(assign=False), or rebuild population and optimizers"
            )
        if current.dtype != expected.dtype or current.shape != expected.shape:
            raise MemberError(
                f"{subject} of {current.dtype} and shape {tuple(current.shape)}, expected {expected.dtype} and "
                f"{tuple(expected.shape)}: convert all members at once with population.to(...)"
            )
        if current.device != expected.device:
            raise MemberError(
                f"{subject} on {current.device}, expected {expected.device}: move all members at once with "
                "population.to(...)"
            )
        return current
