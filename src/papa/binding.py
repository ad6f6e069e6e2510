"""Keeping one module's tensors inside one row of a matrix, and noticing when something moved them out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from papa.errors import MemberError
from papa.layout import Layout, alias, here, is_sharded, tensors_of


@dataclass(frozen=True)
class Place:
    """One attribute of one module that holds a tensor; tied tensors have several places."""

    slot_name: str
    registry: dict[str, Tensor | None]
    key: str
    tensor: Tensor


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
