"""How similar networks are: by the cosine of their weights, or by the correlation of activations on some data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from papa.align.unit_groups import (
    ExportedGraph,
    Symmetries,
    TensorAxis,
    UnitGroup,
    permute_axis_,
    require_tensor,
)
from papa.errors import DataError, MemberError, PapaError


@dataclass(frozen=True)
class BlockPart:
    """Units that every block of a group has in the same places, such as the value units of each attention head."""

    groups: tuple[UnitGroup, ...]
    """For each block, the group of these units inside it."""
    columns: tuple[Tensor, ...]
    """For each axis of the outer group, one row per unit: the columns of the axis's index that the unit takes."""


@dataclass(frozen=True)
class NestedGroup:
    """Units that are matched together: a group, and the units inside its blocks if it has any."""

    outer: UnitGroup
    parts: tuple[BlockPart, ...] = ()

    @property
    def inner(self) -> list[UnitGroup]:
        """The groups inside the blocks."""
        return [group for part in self.parts for group in part.groups]


def nested_groups(symmetries: Symmetries) -> list[NestedGroup]:
    """Every group that lies in no block of another, each with the units inside its blocks.

    Units of a block that have no counterpart in the other blocks are left out: they move with their block.
    """
    alone = {group.name: group for group in symmetries if group.is_inner}
    inner_groups, found = list(alone.values()), []
    for outer in symmetries:
        if outer.is_inner:
            continue
        owners = [_owners(axis) for axis in outer.axes]
        parts: dict[tuple[tuple[int, ...], ...], dict[int, tuple[UnitGroup, tuple[Tensor, ...]]]] = {}
        for inner in inner_groups:
            place = _place(inner, outer, owners)
            if place is not None:
                block, columns = place
                key = tuple(tuple(part.flatten().tolist()) for part in columns)
                parts.setdefault(key, {})[block] = inner, columns
                alone.pop(inner.name, None)
        complete = [
            BlockPart(tuple(blocks[block][0] for block in range(outer.size)), blocks[0][1])
            for blocks in parts.values()
            if len(blocks) == outer.size
        ]
        found.append(NestedGroup(outer, tuple(complete)))
    return found + [NestedGroup(inner) for inner in alone.values()]


def _owners(axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """For each index along an axis, the unit that owns it (-1 if none) and its column in the axis's index."""
    length = int(axis.index.max()) + 1
    owner, column = torch.full((length,), -1, device="cpu"), torch.zeros(length, dtype=torch.int64, device="cpu")
    owner[axis.index] = torch.arange(len(axis.index), device="cpu")[:, None].expand_as(axis.index)
    column[axis.index] = torch.arange(axis.index.shape[1], device="cpu").expand_as(axis.index)
    return owner, column


def _place(
    inner: UnitGroup, outer: UnitGroup, owners: list[tuple[Tensor, Tensor]]
) -> tuple[int, tuple[Tensor, ...]] | None:
    """The block that contains an inner group, and the group's columns on each axis; None if no block does."""
    index_of = {(axis.tensor, axis.dim): axis.index for axis in inner.axes if axis.row_range is None}
    block, columns = -1, []
    for axis, (owner, column) in zip(outer.axes, owners, strict=True):
        index = index_of.get((axis.tensor, axis.dim))
        if index is None:
            columns.append(torch.zeros(inner.size, 0, dtype=torch.int64, device="cpu"))
            continue
        if int(index.max()) >= len(owner):
            return None
        rows = owner[index]
        if bool((rows != rows[0, 0]).any()) or int(rows[0, 0]) < 0 or block not in (-1, int(rows[0, 0])):
            return None
        block = int(rows[0, 0])
        columns.append(column[index])
    return (block, tuple(columns)) if block >= 0 else None


class Comparison(ABC):
    """A network, as working copies that can be permuted, and the reference it is compared with."""

    tensors: dict[str, Tensor]
    """The working copies, by the name that a `TensorAxis` has."""

    @abstractmethod
    def unit_similarity(self, axis: TensorAxis, index: Tensor) -> Tensor:
        """The similarity of each unit of the reference to each unit of the network; row `i` of `index` is unit `i`."""

    @abstractmethod
    def similarity(self, name: str) -> float:
        """The similarity of one tensor to the reference's, in the present order of units."""

    def total(self) -> float:
        """The sum of similarities over all tensors."""
        return sum(map(self.similarity, self.tensors))

    def permute_(self, nested: NestedGroup, permutations: Mapping[str, Tensor]) -> None:
        """Permute the working copies."""
        for group in (nested.outer, *nested.inner):
            for axis in group.axes:
                permute_axis_(self.tensors[axis.tensor], axis, permutations[group.name])


class WeightObjective:
    """The similarity of networks by their weights: the sum over tensors of `<P_a a, P_b b> / (|a| |b|)`.

    Tensors are copied and divided by their norm on access, so that at most one network is in memory once more.
    """

    def __init__(self, networks: Sequence[Mapping[str, Tensor]], symmetries: Symmetries) -> None:
        self.groups = nested_groups(symmetries)
        self._networks = networks
        axes = [axis for group in symmetries for axis in group.axes]
        for axis in axes:
            require_tensor(networks[0], axis)
        self._names = list(dict.fromkeys(axis.tensor for axis in axes))
        self._norms = [{name: float(its[name].detach().double().norm()) for name in self._names} for its in networks]
        self.count = max(sum(bool(networks[0][name].any()) for name in self._names), 1)
        """The number of cosines in the sum."""

    def _tensor(self, member: int, name: str) -> Tensor:
        tensor, norm = self._networks[member][name], self._norms[member][name]
        wide = tensor.detach().to(device="cpu", dtype=torch.promote_types(tensor.dtype, torch.float32), copy=True)
        return wide.div_(norm) if norm > 0 else wide

    def compare(self, member: int) -> WeightComparison:
        own = {name: self._tensor(member, name) for name in self._names}
        return WeightComparison(own, partial(self._tensor, 0))


class WeightComparison(Comparison):
    """The tensors of one network and, by name, of its reference."""

    def __init__(self, tensors: dict[str, Tensor], reference: Callable[[str], Tensor]) -> None:
        self.tensors, self.reference = tensors, reference

    def unit_similarity(self, axis: TensorAxis, index: Tensor) -> Tensor:
        """The inner products of the numbers that units own in one tensor."""
        own, reference = self.tensors[axis.tensor], self.reference(axis.tensor)
        return unit_rows(reference, axis, index) @ unit_rows(own, axis, index).T

    def similarity(self, name: str) -> float:
        return float((self.tensors[name].double() * self.reference(name).double()).sum())


def unit_rows(tensor: Tensor, axis: TensorAxis, index: Tensor) -> Tensor:
    """All numbers that each unit owns in a tensor, one row per unit."""
    part = axis.view(tensor)
    return part.index_select(axis.dim, index.flatten()).movedim(axis.dim, 0).reshape(len(index), -1)


class ActivationObjective:
    """The similarity of networks by their activations: the sum of correlations of paired units at every node.

    Correlations do not depend on the order of units, so one pass over the data serves all groups and all networks.
    """

    def __init__(
        self,
        networks: Sequence[Mapping[str, Tensor]],
        symmetries: Symmetries,
        batches: Sequence[Tensor],
        *,
        subjects: Sequence[str],
    ) -> None:
        if symmetries.graph is None:
            raise PapaError('symmetries written by hand have no graph: match by weights, with by="weights"')
        # A correlation matrix has the reference's units along dim 0 and the network's along dim 1.
        groups = [
            replace(group, axes=tuple(replace(axis, dim=1) for axis in group.activations))
            for group in symmetries
            if group.activations
        ]
        self.groups = nested_groups(Symmetries(tuple(groups)))
        dims = {axis.tensor: axis.dim for group in symmetries for axis in group.activations}
        self._correlations = _correlations(symmetries.graph, networks, batches, dims, subjects)
        indices: dict[str, list[Tensor]] = {name: [] for name in dims}
        for axis in (axis for group in groups for axis in group.axes):
            indices[axis.tensor].append(axis.index.flatten())
        self._covered = {name: torch.cat(parts).bincount().nonzero().flatten() for name, parts in indices.items()}
        self.count = max(sum(map(len, self._covered.values())), 1)
        """The number of correlations in the sum."""

    def compare(self, member: int) -> ActivationComparison:
        return ActivationComparison({name: self._correlations[member][name] for name in self._covered}, self._covered)


class ActivationComparison(Comparison):
    """Correlation matrices of a network's units with those of its reference, for each node of the graph."""

    def __init__(self, tensors: dict[str, Tensor], covered: Mapping[str, Tensor]) -> None:
        self.tensors, self._covered = tensors, covered

    def unit_similarity(self, axis: TensorAxis, index: Tensor) -> Tensor:
        """The correlations of units at one node, summed over the indices that they own there."""
        matrix = self.tensors[axis.tensor]
        return torch.stack([matrix[column][:, column] for column in index.T]).sum(0)

    def similarity(self, name: str) -> float:
        return float(self.tensors[name].diagonal()[self._covered[name]].sum())


def _correlations(
    graph: ExportedGraph,
    networks: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Tensor],
    dims: Mapping[str, int],
    subjects: Sequence[str],
) -> dict[int, dict[str, Tensor]]:
    """For each network but the first and each node, the correlation of each index of the first with each of its own."""
    sums: dict[tuple[str, int], Tensor] = {}
    products: dict[tuple[str, int], Tensor] = {}
    counts: Counter[str] = Counter()

    def add(name: str, outputs: Sequence[Tensor]) -> None:
        units = [output.detach().double().movedim(dims[name], 0).flatten(1) for output in outputs]
        counts[name] += units[0].shape[1]
        for member, own in enumerate(units):
            if not bool(torch.isfinite(own).all()):
                raise MemberError(
                    f"{subjects[member]} has activations that are not finite at '{name}': a network that diverged "
                    "cannot be matched"
                )
            found = torch.stack([own.sum(1), own.square().sum(1)])
            sums[name, member] = sums[name, member] + found if (name, member) in sums else found
            if member:
                product = units[0] @ own.T
                products[name, member] = products[name, member].add_(product) if (name, member) in products else product

    for batch in batches:
        _run_side_by_side(graph, networks, batch, dims, add)
    return {
        member: {
            name: _correlation(sums[name, 0], sums[name, member], products.pop((name, member)), counts[name])
            for name in dims
        }
        for member in range(1, len(networks))
    }


def _run_side_by_side(
    graph: ExportedGraph,
    networks: Sequence[Mapping[str, Tensor]],
    batch: Tensor,
    names: Collection[str],
    add: Callable[[str, Sequence[Tensor]], None],
) -> None:
    """Run the graph with every network's tensors, node by node, so that only activations still needed are in memory."""
    runs = [fx.Interpreter(graph.module) for _ in networks]
    for run, network in zip(runs, networks, strict=True):
        run.args_iter = _arguments(graph, network, batch)
    for node in graph.module.graph.nodes:
        for run in runs:
            run.env[node] = run.run_node(node)
        if node.name in names:
            add(node.name, [run.env[node] for run in runs])
        for run in runs:
            for used in run.user_to_last_uses.get(node, []):
                del run.env[used]


def _arguments(graph: ExportedGraph, network: Mapping[str, Tensor], batch: Tensor) -> Iterator[Tensor]:
    """The value of each placeholder of the graph."""
    for node in graph.module.graph.nodes:
        if node.op != "placeholder":
            return
        if node.target in graph.tensors:
            yield network[graph.tensors[node.target]].detach().cpu()
        elif node.target in graph.constants:
            yield graph.constants[node.target]
        elif node.meta["val"].shape == batch.shape:
            yield batch.cpu().clone()
        else:
            raise DataError(
                f"batches have inputs of shape {tuple(batch.shape)}, but the symmetries were derived with an example "
                f"of shape {tuple(node.meta['val'].shape)}: derive them with a batch of the same shape"
            )


def _correlation(first: Tensor, second: Tensor, product: Tensor, count: int) -> Tensor:
    """Correlations from sums, sums of squares and sums of products; 0 for a unit that never varies."""
    (x, xx), (y, yy) = first / count, second / count
    scale = ((xx - x.square()).clamp(min=0)[:, None] * (yy - y.square()).clamp(min=0)).sqrt()
    covariance = product / count - x[:, None] * y
    return torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0.0)
