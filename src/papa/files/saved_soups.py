"""Soups that are written to files, also of members that no process holds as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from papa.core import layout
from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import Weights
from papa.distributed.mesh import inner_module, like, save_distributed, whole
from papa.errors import SoupError
from papa.storage.tensors import save_network


def save_soup(population: Population, path: str | os.PathLike[str], weights: Weights | None = None) -> None:
    """Write the (weighted) mean of all members to disk. All processes must call it.

    Members under `fully_shard`, which no process holds as a whole, are gathered tensor by tensor. Names are those of
    the network itself, without those of `DistributedDataParallel` and `torch.compile`.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_soup(population, f"{directory}/soup.safetensors")

    Args:
        population: the members.
        path: a file that ends in `.safetensors`; or a new directory for a distributed checkpoint
            (`torch.distributed.checkpoint`), to which each rank of a sharded member writes its own shards.
        weights: one per member, non-negative and summing to 1; by default all the same.
    """
    path, mean = Path(path), _mean_of(population, weights)

    def write() -> list[None]:
        if _is_writer(population):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix != ".safetensors":
                save_distributed(path, mean, population.group)
            elif state := _gathered(mean, population):
                save_network(path, state)
        return []

    gather_or_raise(population.group, write)


def soup_state(
    population: Population, weights: Weights | None = None, *, only_averaged: bool = False
) -> dict[str, Tensor]:
    """The state dict of the mean of all members, whole and on the CPU. All processes must call it.

    With `only_averaged`, without tensors that stay with their member, such as the frozen base of adapters. Processes
    other than the first get an empty dict.
    """
    mean = _mean_of(population, weights, only_averaged=only_averaged)
    return _gathered(mean, population) if _is_writer(population) else {}


def member_state(population: Population, index: int = 0) -> dict[str, Tensor]:
    """The state dict of a local member, whole and on the CPU; empty on all but the first rank that trains it."""
    layout.reshard_(population[index])
    state = inner_module(population[index]).state_dict()
    return _gathered(_tensors(state), population)


def _mean_of(
    population: Population, weights: Weights | None = None, *, only_averaged: bool = False
) -> dict[str, Tensor]:
    """The mean under the names of a state dict, sharded as members are."""
    combined = population.combined(soup_row(population.size, population.active) if weights is None else weights)
    first = next((index for index, member in enumerate(population.members) if member in population.active), 0)
    model = population[first]
    names: dict[int, str] = {}
    for name, tensor in layout.named_tensors(model).items():
        names.setdefault(id(tensor), name)  # as in the layout, tied tensors have their first name
    found = {}
    for name, tensor in _tensors(inner_module(model).state_dict(keep_vars=True)).items():
        averaged = combined.get(names.get(id(tensor), ""))
        if averaged is not None:
            found[name] = like(averaged, tensor)
        elif not only_averaged:
            found[name] = tensor.detach()
    return found


def _tensors(state: dict[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _is_writer(population: Population) -> bool:
    """Whether this process trains the first active member."""
    if not population.active:
        raise SoupError("all members were dropped: there is nothing to average")
    return population.active[0] in population.members


def _gathered(state: dict[str, Tensor], population: Population) -> dict[str, Tensor]:
    """Whole tensors on the CPU, on the first of the ranks that train a member; all of these must call it."""
    found, is_kept = {}, population.group.is_first_of_member
    for name, tensor in state.items():
        gathered = whole(tensor)  # one tensor at a time
        if is_kept:
            found[name] = gathered.detach().cpu()
    return found
