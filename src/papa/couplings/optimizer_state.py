"""Optimizer state that travels with the weights: momenta of columns that are permuted among members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa.core.columns import Lines
from papa.core.layout import Slot, local_part, named_tensors
from papa.core.population import Population
from papa.core.product import permutation
from papa.couplings.masks import Mask


@torch.no_grad()
def permute_state_(population: Population, optimizers: Sequence[Optimizer], mask: Mask) -> None:
    """Permute the state of the members' optimizers as a mask permutes their weights.

    All state with the shape of its parameter is permuted: momenta, and the second moments of Adam. All processes must
    call it. A member without state, because it was just restarted, gives zeros and takes nothing.
    """
    states = [_states_of(population, index, optimizers) for index in range(len(population))]
    found = population.group.all_gather([sorted({key for state in own.values() for key in state}) for own in states])
    keys = sorted({key for one in found for key in one})
    assert mask.sources is not None
    for dtype, columns in mask.columns.items():
        assert isinstance(columns, Lines)
        parts = _by_slot([slot for slot in population._layout.slots if slot.dtype == dtype], columns.indices)
        for key in keys:
            rows = torch.zeros(len(population), len(columns), dtype=dtype, device=columns.numbers.device)
            for own, row in zip(states, rows, strict=True):
                for name, places, within in parts:
                    if key in own.get(name, {}):
                        row[within] = own[name][key][places].to(dtype)
            population.group.update_copies_(rows, permutation(mask.sources[dtype], columns.width))
            for own, row in zip(states, rows, strict=True):
                for name, places, within in parts:
                    if key in own.get(name, {}):
                        own[name][key][places] = row[within].to(own[name][key].dtype)


def _states_of(population: Population, index: int, optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The state of one member's averaged parameters, flat and in the order of their memory."""
    found = {}
    for name, parameter in named_tensors(population[index], population.averaged).items():
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {}) if isinstance(parameter, torch.nn.Parameter) else {}
            tensors = {
                key: local_part(value)
                for key, value in state.items()
                if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape
            }
            stride = local_part(parameter).stride()
            own = {key: _flat(value) for key, value in tensors.items() if value.stride() == stride}
            if own:
                found[name] = own
    return found


def _flat(tensor: Tensor) -> Tensor:
    """All numbers of a dense tensor in the order of its memory, which they share."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _by_slot(slots: Sequence[Slot], columns: Tensor) -> list[tuple[str, Tensor, slice]]:
    """For each tensor with chosen columns: its name, their places in it, and their positions among the columns."""
    bounds = torch.tensor([[slot.offset, slot.offset + slot.numel] for slot in slots], device=columns.device)
    ends = torch.searchsorted(columns, bounds).tolist()
    return [
        (slot.name, columns[start:stop] - slot.offset, slice(start, stop))
        for slot, (start, stop) in zip(slots, ends, strict=True)
        if start < stop
    ]
